"""`make bench`: how much sooner two workers finish the same draws than one, on two cores.

The networks of certify-100k with random weights, through the sharded executor with one actor and
with two, in turns. Seconds of the wall clock: nothing else should run on the machine.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from components.data.prepared import PreparedDataset
from components.models.checkpoint import save_model
from components.train.session import initial_model
from pipelines import build
from pipelines import recipe as recipes
from pipelines.runtime.artifacts import StageDir
from pipelines.runtime.cluster import ray_cluster
from pipelines.runtime.parts import PartStore
from pipelines.runtime.shards import run_units
from pipelines.sections import ClusterSection, GaussianCertify
from pipelines.stages import prepare
from pipelines.stages.voting import VoteConfig, make_voter, plan_votes

ROUNDS, NUM_ITEMS, FASTER = 3, 4, 1.8


def prepare_work(folder: Path) -> VoteConfig:
    limits = f"data.limits={{train: 20, val: 10, test: {NUM_ITEMS}}}"
    recipe = recipes.load("certify-100k", overrides=[limits])
    data = folder / "data"
    data.mkdir()
    prepare.run(recipe, {}, StageDir(data, "prepare", "bench", run=None))  # type: ignore[arg-type]
    dataset = PreparedDataset.open(data)
    for name in recipe.model_names():
        model = initial_model(build.model_spec(recipe, dataset, name), seed=0)
        save_model(folder / name, model, recipe_digest="bench")
    own = recipe.certify["l2"]
    assert isinstance(own, GaussianCertify)
    section = own.model_copy(update={"num_estimate": 6000, "block_size": 1000})
    source = f"model:{folder / 'denoiser'}"
    return VoteConfig(data, folder / "main", section, None, 0, "cpu", denoiser=source)


def main() -> int:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, ray_cluster(ClusterSection(num_cpus=2)):
        config = prepare_work(Path(name))
        units = plan_votes(config, num_items=NUM_ITEMS)

        def seconds(num_actors: int, label: str) -> float:
            cluster = ClusterSection(num_cpus=2, num_actors=num_actors)
            parts = PartStore(Path(name) / label, run_id="bench")
            began = time.perf_counter()
            run_units(
                units, make=make_voter, config=config, parts=parts, cluster=cluster, label=label
            )
            return time.perf_counter() - began

        seconds(2, "warm-up")  # starts both actors, which stay
        rounds = [
            (seconds(1, f"one-{number}"), seconds(2, f"two-{number}")) for number in range(ROUNDS)
        ]
    ratios = [one / two for one, two in rounds]
    median = statistics.median(ratios)
    print(json.dumps({
        "benchmark": "one worker / two workers, denoised draws", "units": len(units),
        "draws": NUM_ITEMS * 6100, "seconds": [[round(x, 2) for x in pair] for pair in rounds],
        "ratios": [round(ratio, 3) for ratio in ratios], "median_ratio": round(median, 3),
        "at_least": FASTER, "load": round(os.getloadavg()[0], 1),
    }))  # fmt: skip
    return int(median < FASTER)


if __name__ == "__main__":
    sys.exit(main())
