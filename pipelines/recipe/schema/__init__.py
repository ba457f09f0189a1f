"""The schema of a recipe: settings classes of the components, and the sections of pipelines."""
