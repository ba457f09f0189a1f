"""Training objectives: one file per objective, one interface for all."""
