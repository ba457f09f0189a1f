"""Recipes: read from YAML, checked against the schema, refused by one gate before work starts."""
