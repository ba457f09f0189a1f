"""`make bench`: votes by two workers against one, through the sharded executor.

Two cases on real digits: column votes by a transformer of the size of ViT-T, and noisy copies
behind a denoiser, with the networks of `certify-100k`. One thread for each worker, one and two
workers in turns. Actors are started, and have computed some units, before anything is timed.

Two workers need two cores for themselves. Where other programs take part of them the ratio of wall
times means little; the load is printed beside it, and so is where two times the speed got lost:

by_processor_time   all work of one worker over that of the busier of two: an uneven share, or cores
                    that slow each other down
slower_side_by_side processor time of the same units by two workers over that by one
idle_tail           share of the two workers' time that one waits for the other at the end
waiting             share of their time between units
others              processor time of driver and Ray over that of the two workers

`python -m tests.benchmarks.workers patch` measures one case.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa

from components.certify.l2.settings import GaussianSettings
from components.certify.l2.voters import draw_units
from components.certify.patch.settings import AblationSettings
from components.certify.patch.voters import item_units, voting_ablations
from components.certify.registry import family_of
from components.certify.tasks import VoteTask
from components.denoising.diffusion import Diffusion
from components.denoising.importing import denoiser_spec
from components.denoising.loading import source_of
from components.models.checkpoint import save_model
from components.train.session import initial_model
from pipelines.recipe.schema.place import ClusterSection
from pipelines.runtime.cluster import ray_cluster
from pipelines.runtime.parts import PartStore
from pipelines.runtime.shards import Unit, release_workers, run_units
from pipelines.stages.certify.worker import make_voter
from tests.benchmarks.executor import prepare_work
from tests.benchmarks.table import promise

LIMIT = 1.8
ROUNDS = 5
UNITS = 40  # 20 for each of two workers; more would show nothing new


class TimedVoter:
    """A voter that reports when it worked, and for how long, instead of its votes."""

    def __init__(self, config: VoteTask[Any]) -> None:
        self.voter = make_voter(config)

    def __call__(self, payload: object) -> pa.Table:
        began, used = time.time(), time.process_time()
        self.voter(payload)
        used = time.process_time() - used
        row = {"worker": os.getpid(), "began": began, "ended": time.time(), "seconds": used}
        return pa.Table.from_pylist([row])


@dataclass(frozen=True)
class Times:
    """What one run of all units cost."""

    workers: int  # that took part
    wall: float
    busiest: float  # processor time of the worker that had the most
    total: float  # of all workers
    idle_tail: float
    waiting: float
    others: float


def patch_votes(folder: Path) -> tuple[VoteTask[Any], list[Unit]]:
    """Votes over 32 column bands, 20 images a unit."""
    num_items = 20 * UNITS
    request = prepare_work(folder, num_items=num_items, embed_dim=192, num_heads=3, depth=12)
    section = AblationSettings(kind="columns", patch_sizes=(1,), num_items=num_items, band=4)
    task = family_of("columns").prepare(replace(request, settings=section), source=None)
    return task, item_units(num_items, num_votes=len(voting_ablations(task)))


def noisy_votes(folder: Path) -> tuple[VoteTask[Any], list[Unit]]:
    """Draws behind a denoiser, 2,500 a unit: every image is spread over ten units."""
    num_items = UNITS // 10
    request = prepare_work(folder, num_items=num_items)
    spec = denoiser_spec(
        architecture="tiny_unet", channels=1, image_size=32,
        options={"widths": [16, 32], "patch": 4}, diffusion=Diffusion.named("linear", 1000),
    )  # fmt: skip
    save_model(folder / "denoiser", initial_model(spec, seed=0), recipe_digest="bench")
    section = GaussianSettings(
        kind="gaussian", denoiser="cleaner", sigma=0.5, num_items=num_items,
        num_estimate=25_000, block_size=2_500,
    )  # fmt: skip
    source = source_of(folder / "denoiser")
    request = replace(request, settings=section, denoiser=source)
    return family_of("gaussian").prepare(request, source=None), draw_units(section, num_items)


CASES: dict[str, Callable[[Path], tuple[VoteTask[Any], list[Unit]]]] = {
    "patch": patch_votes,
    "l2": noisy_votes,
}


def processor_time() -> float:
    """Of this process and all that it started: driver, Ray and the workers."""
    total = 0.0
    here = psutil.Process()
    for process in (here, *here.children(recursive=True)):
        try:
            total += sum(process.cpu_times()[:2])
        except psutil.NoSuchProcess:
            continue
    return total


def timed(
    units: Sequence[Unit], config: VoteTask[Any], folder: Path, *, name: str, num_actors: int
) -> Times:
    """All units by so many workers that are there already."""
    parts = PartStore.in_folder(folder / f"{name}-{num_actors}", run_id="bench")
    cluster = ClusterSection(num_cpus=2, num_actors=num_actors)
    used, began = processor_time(), time.perf_counter()
    run_units(units, make=TimedVoter, config=config, parts=parts, cluster=cluster, label="bench")
    wall, used = time.perf_counter() - began, processor_time() - used
    rows = [row for t in parts.tables([unit.name for unit in units]) for row in t.to_pylist()]
    of_worker = [
        [row for row in rows if row["worker"] == worker] for worker in {r["worker"] for r in rows}
    ]
    busy = [sum(row["seconds"] for row in own) for own in of_worker]
    spans = [max(r["ended"] for r in own) - min(r["began"] for r in own) for own in of_worker]
    worked = sum(row["ended"] - row["began"] for row in rows)
    ends = [max(row["ended"] for row in own) for own in of_worker]
    return Times(
        workers=len(of_worker),
        wall=wall,
        busiest=max(busy),
        total=sum(busy),
        idle_tail=sum(max(ends) - end for end in ends) / (wall * len(ends)),
        waiting=(sum(spans) - worked) / (wall * len(ends)),
        others=(used - sum(busy)) / sum(busy),
    )


def measure(case: str) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config, units = CASES[case](folder)

        def run(label: str, num_actors: int) -> Times:
            # A call ends workers that it does not need, and a short one ends before new ones start.
            started, attempt = 0, 0
            while started < num_actors:
                attempt += 1
                name = f"{label}-start-{attempt}"
                started = timed(units, config, folder, name=name, num_actors=num_actors).workers
            return timed(units, config, folder, name=label, num_actors=num_actors)

        rounds = [(run(f"round-{i}", 1), run(f"round-{i}", 2)) for i in range(ROUNDS)]
    release_workers()  # the next case prepares its data on their cores

    def median(value: Callable[[Times, Times], float]) -> float:
        return statistics.median(value(one, two) for one, two in rounds)

    ratio = median(lambda one, two: one.wall / two.wall)
    return {
        "benchmark": f"{case} votes, 2 workers / 1 worker",
        "units": len(units),
        "seconds_a_unit": round(median(lambda one, two: one.wall / len(units)), 2),
        "ratios": [round(one.wall / two.wall, 2) for one, two in rounds],
        "median_ratio": round(ratio, 3),
        "limit": LIMIT,
        "passed": ratio >= LIMIT,
        "by_processor_time": round(median(lambda one, two: one.busiest / two.busiest), 2),
        "slower_side_by_side": round(median(lambda one, two: two.total / one.total), 3),
        "idle_tail": round(median(lambda one, two: two.idle_tail), 3),
        "waiting": round(median(lambda one, two: two.waiting), 3),
        "others": round(median(lambda one, two: two.others), 3),
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> int:
    with ray_cluster(ClusterSection(num_cpus=2)):
        passed = []
        for case in sys.argv[1:] or CASES:
            row = measure(case)
            print(json.dumps(row), flush=True)
            title, ratio = str(row["benchmark"]), float(row["median_ratio"])  # type: ignore[arg-type]
            passed.append(promise(title, ratio=ratio, at_least=LIMIT, peer="1 worker"))
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
