"""Analyses in the report: charts and galleries of one model, each with the numbers behind it."""
