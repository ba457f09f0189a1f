"""`make bench`: patch votes by two workers against one, through the sharded executor.

Column votes on real digits by a transformer about as wide as ViT-T, one thread for each worker,
one and two workers in turns. Actors are started and have loaded the model before anything is timed.
Two workers need two cores for themselves: the load of the machine is printed beside the ratio.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from pipelines.runtime.cluster import ray_cluster
from pipelines.runtime.parts import PartStore
from pipelines.runtime.shards import run_units
from pipelines.sections import AblationCertify, ClusterSection
from pipelines.stages.voting import make_voter, plan_votes
from tests.benchmarks.executor import prepare_work

LIMIT = 1.8
ROUNDS = 5
NUM_ITEMS = 320  # 16 units
SIZE = {"embed_dim": 192, "num_heads": 3, "depth": 4}


def main() -> int:
    section = AblationCertify(kind="columns", patch_sizes=[1], num_items=NUM_ITEMS)
    with tempfile.TemporaryDirectory() as name, ray_cluster(ClusterSection(num_cpus=2)):
        config = prepare_work(Path(name), num_items=NUM_ITEMS, **SIZE)
        config = replace(config, section=section, band=4)
        units = plan_votes(config, num_items=NUM_ITEMS)

        def seconds(num_actors: int, label: str) -> float:
            parts = PartStore(Path(name) / f"{label}-{num_actors}", run_id="bench")
            cluster = ClusterSection(num_cpus=2, num_actors=num_actors)
            began = time.perf_counter()
            run_units(
                units, make=make_voter, config=config, parts=parts, cluster=cluster, label="bench"
            )
            return time.perf_counter() - began

        seconds(2, "warm-up")
        rounds = [(seconds(1, f"round-{i}"), seconds(2, f"round-{i}")) for i in range(ROUNDS)]
    ratios = [one / two for one, two in rounds]
    median = statistics.median(ratios)
    print(json.dumps({
        "benchmark": "patch votes, 2 workers / 1 worker", "units": len(units),
        "ratios": [round(ratio, 2) for ratio in ratios],
        "median_ratio": round(median, 2), "limit": LIMIT, "passed": median >= LIMIT,
        "load": round(os.getloadavg()[0], 1),
    }))  # fmt: skip
    return int(median < LIMIT)


if __name__ == "__main__":
    sys.exit(main())
