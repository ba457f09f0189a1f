"""The flow of a recipe: its plan with fingerprints, and the run of what is missing."""
