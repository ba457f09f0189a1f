"""What every stage stands on: the cluster, the sharded executor, jobs, tracking, artifacts, progress."""
