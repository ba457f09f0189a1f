"""Model card: all finished results about one model, on one page."""
