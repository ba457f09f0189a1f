"""Variables of every worker process. Light to import: files for clusters name them, too."""

import os

FIXED_ENV = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # glibc otherwise hands large tensors back to the kernel after every layer: 20,000 page faults
    # per thousand noisy draws, a tenth of the time.
    "MALLOC_MMAP_THRESHOLD_": str(2**28),
    "MALLOC_TRIM_THRESHOLD_": str(2**29),
}
WORKER_ENV = {
    **FIXED_ENV,
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"],
}
