"""What a model withstands, measured: per-item results and the metrics that follow from them."""
