"""Fixed times of a flow on this machine: starts of Ray, of workers, and of the tracking store.

Measured once per estimate, in a process of its own that starts what a flow starts:
`python -m pipelines.flow.overheads NUM_CPUS`.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from components.core.errors import CasemateError, last_line
from pipelines.recipe.costs import NO_SPEED, Seconds, Speed, StepCost
from pipelines.recipe.schema.place import ClusterSection

LIGHT = 3  # processes without torch that Ray Data starts for a dataset


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds by the clock and of the processor."""

    ray: Speed = NO_SPEED
    light_worker: Speed = NO_SPEED
    """A process of Ray's without torch."""
    worker: Speed = NO_SPEED
    """One that loads the code of a stage, torch included."""
    tracking: Speed = NO_SPEED
    """A new store with a first run."""

    def of_step(self, cost: StepCost, num_workers: int) -> Seconds:
        """What a step takes besides its passes."""
        if cost.stage == "report":
            return Seconds()
        if cost.stage == "prepare":  # the first step waits for Ray and the store
            return _seconds(self.ray + self.tracking + LIGHT * self.light_worker)
        if cost.stage == "train":  # a controller, then the workers at once
            both = self.light_worker + self.worker
            return _seconds(both, cpu=self.light_worker.cpu + num_workers * self.worker.cpu)
        return _seconds(self.worker, cpu=num_workers * self.worker.cpu)


def _seconds(speed: Speed, *, cpu: float | None = None) -> Seconds:
    spent = speed.cpu if cpu is None else cpu
    return Seconds(speed.wall, speed.wall, spent, spent)


def measured_overheads(cluster: ClusterSection) -> Overheads:
    """Start a Ray, two workers and a store, and see what it takes."""
    command = [sys.executable, "-m", "pipelines.flow.overheads", str(cluster.num_cpus or 0)]
    root = Path(__file__).parents[2]
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path}
    )
    if done.returncode:
        reason = last_line(RuntimeError(done.stderr.strip() or "no word of why"))
        raise CasemateError("--measure", "Ray", f"does not start here: {reason}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return Overheads(**{name: Speed(*speed) for name, speed in found.items()})


def main(num_cpus: int) -> None:
    """Print what each start takes."""
    import psutil

    def spent() -> float:
        """Processor time of this process and of all that it has started."""
        own = psutil.Process()
        total = 0.0
        for process in [own, *own.children(recursive=True)]:
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system
        return total

    def timed(start: Callable[[], Any]) -> Speed:
        wall, cpu = time.perf_counter(), spent()
        start()
        return Speed(time.perf_counter() - wall, max(spent() - cpu, 0.0))

    found: dict[str, Speed] = {}
    with tempfile.TemporaryDirectory() as folder:
        found["tracking"] = timed(lambda: _track(Path(folder)))
        import ray

        from pipelines.runtime.cluster import connect

        found["ray"] = timed(
            lambda: connect(ClusterSection(num_cpus=num_cpus or None), address=None)
        )

        @ray.remote(num_cpus=0)
        class Started:
            def load(self, module: str) -> str:
                __import__(module)
                return module

        def start(module: str) -> Callable[[], Any]:
            return lambda: ray.get(Started.remote().load.remote(module))  # type: ignore[attr-defined]

        found["light_worker"] = timed(start("pipelines.stages.train.worker"))
        found["worker"] = timed(start("pipelines.stages.train.session"))
        ray.shutdown()
    told = {name: list(asdict(speed).values()) for name, speed in found.items()}
    sys.stdout.write(json.dumps(told) + "\n")


def _track(folder: Path) -> None:
    """What the driver of a flow loads, and a store with a run."""
    from mlflow import MlflowClient

    import pipelines.flow.run  # noqa: F401 - with all that it needs

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    run = client.create_run(client.create_experiment("overheads"))
    client.log_param(run.info.run_id, "name", "value")


if __name__ == "__main__":
    main(int(sys.argv[1]))
