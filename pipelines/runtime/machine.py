"""Load of the machine that trains, under MLflow's names of system metrics.

Workers import this module: it stays free of torch and mlflow.
"""

import json
import os
import sys
import time
from pathlib import Path

import psutil

MACHINE = "machine.jsonl"  # one sample per line
FIRST_SECONDS = 0.01  # a load is measured since the last look; the shortest training has one
INTERVAL_ENV = "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL"
MEGABYTE = 1e6


class MachineLog:
    """Appends a sample to a file every ten seconds; a resumed training goes on with it."""

    def __init__(self, path: Path) -> None:
        self.path, self.every = path, float(os.environ.get(INTERVAL_ENV) or 10)
        self.due = time.monotonic() + min(FIRST_SECONDS, self.every)
        self.network = psutil.net_io_counters()
        psutil.cpu_percent()  # the first call only starts the clock

    def sample(self) -> None:
        """Write a sample if it is time for one."""
        if time.monotonic() < self.due:
            return
        self.due = time.monotonic() + self.every
        with self.path.open("a") as file:
            file.write(json.dumps(self._load() | _gpus()) + "\n")

    def _load(self) -> dict[str, float]:
        memory, disk = psutil.virtual_memory(), psutil.disk_usage(str(self.path.parent))
        before, self.network = self.network, psutil.net_io_counters()
        received = self.network.bytes_recv - before.bytes_recv
        sent = self.network.bytes_sent - before.bytes_sent
        return {
            "system/cpu_utilization_percentage": psutil.cpu_percent(),
            "system/system_memory_usage_megabytes": memory.used / MEGABYTE,
            "system/system_memory_usage_percentage": memory.percent,
            "system/disk_usage_percentage": disk.percent,
            "system/disk_usage_megabytes": disk.used / MEGABYTE,
            "system/disk_available_megabytes": disk.free / MEGABYTE,
            "system/network_receive_megabytes": received / MEGABYTE,
            "system/network_transmit_megabytes": sent / MEGABYTE,
        }


def _gpus() -> dict[str, float]:
    """Memory of the GPUs that this process sees; a worker has torch loaded already."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {}
    found = {}
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        found[f"system/gpu_{i}_memory_usage_megabytes"] = (total - free) / MEGABYTE
        found[f"system/gpu_{i}_memory_usage_percentage"] = 100 * (total - free) / total
    return found
