"""Stage train: one model with Ray Train."""
