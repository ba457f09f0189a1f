"""`make bench`: what 100,000 units cost the driver, and how many objects they leave.

- Driver: empty units on real Ray calls. 64 workers are 64 entries of the pool that share two actor
  processes, so the driver has as many calls under way as with 64 processes; what is measured is the
  processor time of this process with all its threads.
- Second start: the same units, all finished; no object may be read.
- Objects: units of about a second on 64 simulated workers, by the loop of the executor.
"""

import heapq
import json
import random
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from itertools import count, cycle
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa

from components.core.units import Unit, WorkFn
from pipelines.recipe.schema.place import ClusterSection
from pipelines.runtime import shards
from pipelines.runtime.actors import ActorCrew, ActorPool, ShardWorker
from pipelines.runtime.cluster import ray_cluster
from pipelines.runtime.crew import Event, Place, Ready, Returned, State, Worker
from pipelines.runtime.dispatch import Dispatch
from pipelines.runtime.leases import Lease, Outcome, Pulse
from pipelines.runtime.parts import PartStore
from pipelines.runtime.store import Store
from tests.benchmarks.table import promise

NUM_UNITS, NUM_WORKERS, NUM_PROCESSES = 100_000, 64, 2
DRIVER_LIMIT = 0.05  # ms of processor time per unit
OBJECTS_LIMIT = 1.1  # per worker and 30 s, with the short leases at both ends
RESUME_LIMIT = 5.0  # seconds


def make_nothing(_: object) -> WorkFn:
    table = pa.table({"prediction": pa.array([1], pa.uint16())})
    return lambda payload: table


class SharedProcesses(ActorPool):
    """Workers of the pool that share a few processes."""

    def reshape(self, cluster: ClusterSection) -> None:
        if not self.shape:
            super().reshape(cluster)
            made = [ShardWorker.options(num_cpus=1).remote(1) for _ in range(NUM_PROCESSES)]
            self.processes = cycle(made)

    def start(self, *, avoid: Collection[str]) -> None:
        self.probe(next(self.processes))


def units_of(number: int) -> list[Unit]:
    return [Unit(f"item-{i:08d}-draw-000000000", f"item {i}", i) for i in range(number)]


def run(units: Sequence[Unit], folder: Path, cluster: ClusterSection) -> float:
    """Processor seconds of this process."""
    parts = PartStore.in_folder(folder, run_id="bench")
    began = time.process_time()
    shards.run_units(
        units, make=make_nothing, config=None, parts=parts, cluster=cluster, label="bench"
    )
    return time.process_time() - began


def driver(folder: Path) -> dict[str, Any]:
    cluster = ClusterSection(num_cpus=NUM_PROCESSES, num_actors=NUM_WORKERS)
    units = units_of(NUM_UNITS)
    with (
        ray_cluster(cluster),
        mock.patch.object(shards, "_POOL", SharedProcesses()),
        mock.patch.object(ActorCrew, "capacity", return_value=NUM_WORKERS),
    ):
        run(units_of(2_000), folder / "warm-up", cluster)
        wall = time.perf_counter()
        used = run(units, folder / "units", cluster)
        wall = time.perf_counter() - wall
        refused = mock.Mock(side_effect=AssertionError("an object was read"))
        with mock.patch.multiple(Store, get=refused, get_range=refused, find=refused):
            began = time.perf_counter()
            run(units, folder / "units", cluster)
            resumed = time.perf_counter() - began
    objects = list((folder / "units").glob("*/*.arrow"))
    return {
        "driver_ms_per_unit": round(1e3 * used / NUM_UNITS, 4),
        "driver_limit": DRIVER_LIMIT,
        "wall_ms_per_unit": round(1e3 * wall / NUM_UNITS, 4),
        "objects": len(objects),
        "bytes_per_unit": round(sum(path.stat().st_size for path in objects) / NUM_UNITS, 1),
        "second_start_seconds": round(resumed, 2),
        "second_start_limit": RESUME_LIMIT,
    }


class Simulated:
    """Workers that are there from the start; a unit takes 0.5 to 1.5 s of their own clock."""

    num_pending = 0

    def __init__(self) -> None:
        self.now, self.ties, self.numbers = 0.0, count(), random.Random(0)
        self.objects = 0
        workers = [Worker(number, Place("n", "n")) for number in range(NUM_WORKERS)]
        self.ready = [Ready(worker) for worker in workers]
        self.free_at = dict.fromkeys(workers, 0.0)
        self.events: list[tuple[float, int, Returned]] = []

    def capacity(self) -> int:
        return NUM_WORKERS

    def nodes(self) -> Collection[str]:
        return {"n"}

    def hire(self, *, avoid: Collection[str]) -> None:
        """They are all there."""

    def trim(self, num_pending: int) -> None:
        """None is pending."""

    def dismiss(self, worker: Worker, *, hold: bool = False) -> None:
        raise AssertionError("no worker fails here")

    def pulses(self) -> Mapping[int, Pulse]:
        return {}

    def needs(self) -> str:
        return ""

    def send(self, worker: Worker, lease: Lease) -> None:
        seconds = sum(self.numbers.uniform(0.5, 1.5) for _ in lease.units)
        self.free_at[worker] = max(self.free_at[worker], self.now) + seconds
        ended = Returned(worker, lease, Outcome(len(lease.units), seconds, "key"))
        heapq.heappush(self.events, (self.free_at[worker], next(self.ties), ended))
        self.objects += 1

    def wait(self, seconds: float) -> Sequence[Event]:
        if self.ready:
            ready, self.ready = self.ready, []
            return ready
        self.now, _, event = heapq.heappop(self.events)
        return [event]


class Silent:
    """A desk that keeps nothing."""

    def more(self, room: int, *, ahead: int) -> Sequence[Unit]:
        return ()

    def keep(self, units: Sequence[Unit], outcome: Outcome) -> None: ...

    def look(self, state: State) -> None: ...

    def tell(self, text: str) -> None: ...


def objects() -> dict[str, Any]:
    crew, units = Simulated(), units_of(NUM_UNITS)
    Dispatch(crew, Silent(), units, max_wait=60, clock=lambda: crew.now).run()
    least = NUM_UNITS / NUM_WORKERS  # seconds, with a second per unit
    return {
        "simulated_minutes": round(crew.now / 60, 1),
        "idle_share": round(1 - least / crew.now, 4),
        "objects": crew.objects,
        "objects_per_worker_and_30_s": round(crew.objects / NUM_WORKERS / (crew.now / 30), 3),
        "objects_limit": OBJECTS_LIMIT,
    }


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        found = driver(Path(name))
    print(json.dumps({"benchmark": f"{NUM_UNITS} empty units, {NUM_WORKERS} workers on "
                      f"{NUM_PROCESSES} processes", **found}))  # fmt: skip
    left = objects()
    print(json.dumps({"benchmark": f"{NUM_UNITS} units of a second, {NUM_WORKERS} simulated "
                      "workers", **left}))  # fmt: skip
    limits = {
        f"driver's processor ms per unit, {NUM_UNITS} empty units": (
            found["driver_ms_per_unit"], DRIVER_LIMIT,
        ),
        "seconds of a second start": (found["second_start_seconds"], RESUME_LIMIT),
        "objects per worker and 30 s": (left["objects_per_worker_and_30_s"], OBJECTS_LIMIT),
    }  # fmt: skip
    kept = [
        promise(what, ratio=figure, at_most=limit, ours=f"{figure:g}")
        for what, (figure, limit) in limits.items()
    ]
    return int(not all(kept))


if __name__ == "__main__":
    sys.exit(main())
