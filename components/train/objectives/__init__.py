"""What a training step minimises: one file per objective, one interface for all."""
