"""Chapters of the report about the evaluation suites, from `metrics.parquet`."""
