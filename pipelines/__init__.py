"""Recipes, stages and flows on Ray, tracked in MLflow."""

import os
import sys

# Ray reads RAY_AUTH_MODE on import; if it was imported without it, clusters refuse the connection.
RAY_CAME_FIRST = "ray" in sys.modules and "RAY_AUTH_MODE" not in os.environ

# Read by Ray at import or by its child processes: must be set before `import ray`.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "300")
os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")
os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S", "0")
os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # units in flight when a stage fails
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # the new output prints tables at verbosity 0
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

from components.core.folders import Folder, add_opener  # noqa: E402 - Ray comes after the above


def _open_uri(uri: str) -> Folder:
    from pipelines.runtime.storage import step_at

    return step_at(uri)


add_opener(_open_uri)
