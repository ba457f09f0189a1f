"""What a finished model withstands: accuracy with exact intervals."""
