"""Weights of other projects into our model format: read, unwrap, rename, fit, report."""
