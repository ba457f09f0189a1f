"""Bytes to tensors in [0, 1]: sources, splits, the prepared format, ablation masks."""
