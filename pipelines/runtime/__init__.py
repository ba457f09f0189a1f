"""What every stage stands on: cluster, sharded executor, jobs, tracking, artifacts, progress."""
