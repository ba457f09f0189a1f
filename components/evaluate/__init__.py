"""What a model withstands, measured on corrupted, shifted and transformed images."""
