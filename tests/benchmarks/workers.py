"""`make bench`: patch votes by two workers against one, through the sharded executor.

Column votes on real digits by a transformer about as wide as ViT-T, one thread for each worker,
one and two workers in turns. Actors are started and have loaded the model before anything is timed.
Two workers need two cores for themselves. Where other programs take part of them the ratio of wall
times means little; the load is printed beside it, and so is the ratio in processor time: all work
of one worker over that of the busier of two, which shows an uneven share or a slower core only.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from pipelines.runtime.cluster import ray_cluster
from pipelines.runtime.parts import PartStore
from pipelines.runtime.shards import run_units
from pipelines.sections import AblationCertify, ClusterSection
from pipelines.stages.voting import VoteConfig, make_voter, plan_votes
from tests.benchmarks.executor import prepare_work

LIMIT = 1.8
ROUNDS = 5
NUM_ITEMS = 320  # 16 units
SIZE = {"embed_dim": 192, "num_heads": 3, "depth": 4}


class TimedVoter:
    """A voter that reports its processor time instead of its votes."""

    def __init__(self, config: VoteConfig) -> None:
        self.voter = make_voter(config)

    def __call__(self, payload: object) -> pa.Table:
        began = time.process_time()
        self.voter(payload)
        seconds = time.process_time() - began
        return pa.table({"worker": [os.getpid()], "seconds": [seconds]})


@dataclass(frozen=True)
class Times:
    wall: float
    busiest: float  # processor time of the worker that had the most


def main() -> int:
    section = AblationCertify(kind="columns", patch_sizes=[1], num_items=NUM_ITEMS)
    with tempfile.TemporaryDirectory() as name, ray_cluster(ClusterSection(num_cpus=2)):
        config = prepare_work(Path(name), num_items=NUM_ITEMS, **SIZE)
        config = replace(config, section=section, band=4)
        units = plan_votes(config, num_items=NUM_ITEMS)

        def timed(num_actors: int, label: str) -> Times:
            parts = PartStore(Path(name) / f"{label}-{num_actors}", run_id="bench")
            cluster = ClusterSection(num_cpus=2, num_actors=num_actors)
            began = time.perf_counter()
            run_units(
                units, make=TimedVoter, config=config, parts=parts, cluster=cluster, label="bench"
            )
            wall, busy = time.perf_counter() - began, Counter()
            for table in parts.tables([unit.name for unit in units]):
                for row in table.to_pylist():
                    busy[row["worker"]] += row["seconds"]
            return Times(wall, max(busy.values()))

        timed(2, "warm-up")
        rounds = [(timed(1, f"round-{i}"), timed(2, f"round-{i}")) for i in range(ROUNDS)]
    ratios = [one.wall / two.wall for one, two in rounds]
    by_processor = [one.busiest / two.busiest for one, two in rounds]
    median = statistics.median(ratios)
    print(json.dumps({
        "benchmark": "patch votes, 2 workers / 1 worker", "units": len(units),
        "ratios": [round(ratio, 2) for ratio in ratios],
        "median_ratio": round(median, 2), "limit": LIMIT, "passed": median >= LIMIT,
        "by_processor_time": round(statistics.median(by_processor), 2),
        "load": round(os.getloadavg()[0], 1),
    }))  # fmt: skip
    return int(median < LIMIT)


if __name__ == "__main__":
    sys.exit(main())
