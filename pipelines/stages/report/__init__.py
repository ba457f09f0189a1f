"""Stage report: one HTML page from finished steps."""
