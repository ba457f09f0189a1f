"""Shared by all stages: cluster, sharded executor, jobs, tracking, artifacts, progress."""
