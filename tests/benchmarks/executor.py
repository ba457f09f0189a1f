"""`make bench`: what the sharded executor costs over a plain loop, at one worker.

The same l2 votes (blocks of noisy draws, the demo's network) are computed by a plain loop in this
process and by the executor with one actor, in turns, one thread each. The ratio of each round is
printed and their median compared with the limit; starting the actor is not counted.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from components.certify.l2.settings import GaussianSettings
from components.certify.l2.voters import draw_units
from components.certify.registry import family_of
from components.certify.vote_requests import VoteRequest
from components.models.checkpoint import save_model
from components.models.spec import ModelSpec
from components.train.session import initial_model
from pipelines.recipe import load as recipes
from pipelines.recipe.schema.place import ClusterSection
from pipelines.runtime.artifacts import StageDir
from pipelines.runtime.cluster import ray_cluster
from pipelines.runtime.parts import PartStore
from pipelines.runtime.shards import run_units
from pipelines.stages.certify.worker import make_voter
from pipelines.stages.prepare import stage as prepare
from tests.benchmarks.table import promise

os.environ.setdefault("RAY_worker_niceness", "0")  # both sides with the same right to the cores

LIMIT = 1.10
ROUNDS = 5
NUM_ITEMS = 12


def prepare_work(folder: Path, *, num_items: int = NUM_ITEMS, **options: int) -> VoteRequest[Any]:
    """Real digits and a freshly initialised network, of the demo's size but for `options`."""
    limits = f"data.limits={{train: 20, val: 10, test: {num_items}}}"
    recipe = recipes.load("demo", overrides=[limits])
    data = folder / "data"
    data.mkdir()
    prepare.run(recipe, {}, StageDir(data, "prepare", "bench", run=None))  # type: ignore[arg-type]
    spec = ModelSpec(
        architecture="tiny_vit", num_classes=10, channels=1, image_size=32, mean=(0.5,), std=(0.5,),
        options={**recipe.model.options, **options}, token_policy="drop",
    )  # fmt: skip
    save_model(folder / "model", initial_model(spec, seed=0), recipe_digest="bench")
    section = GaussianSettings(
        kind="gaussian", sigma=0.25, num_estimate=1000, num_items=num_items, block_size=1000
    )
    return VoteRequest(
        settings=section, key="bench", dataset=data, model=folder / "model", denoiser=None, seed=0,
        device="cpu",
    )  # fmt: skip


def main() -> int:
    torch.set_num_threads(1)
    cluster = ClusterSection(num_cpus=2, num_actors=1)
    with tempfile.TemporaryDirectory() as name, ray_cluster(cluster):
        request = prepare_work(Path(name))
        config = family_of(request.settings.kind).prepare(request, source=None)
        units = draw_units(request.settings, NUM_ITEMS)
        voter = make_voter(config)

        def loop() -> float:
            began = time.perf_counter()
            for unit in units:
                voter(unit.payload)
            return time.perf_counter() - began

        def executor(label: str) -> float:
            parts = PartStore.in_folder(Path(name) / label, run_id="bench")
            began = time.perf_counter()
            run_units(
                units, make=make_voter, config=config, parts=parts, cluster=cluster, label="bench"
            )
            return time.perf_counter() - began

        executor("warm-up"), loop()
        rounds = [(loop(), executor(f"round-{index}")) for index in range(ROUNDS)]
    ratios = [sharded / plain for plain, sharded in rounds]
    median = statistics.median(ratios)
    print(json.dumps({
        "benchmark": "executor overhead, 1 worker", "units": len(units),
        "plain_seconds": [round(plain, 3) for plain, _ in rounds],
        "ratios": [round(ratio, 3) for ratio in ratios],
        "median_ratio": round(median, 3), "limit": LIMIT,
    }))  # fmt: skip
    ours, peer = (statistics.median(pair[side] for pair in rounds) for side in (1, 0))
    return int(not promise(
        "sharded executor over a plain loop, 1 worker", ratio=median, at_most=LIMIT,
        peer=f"plain loop {peer:.2f} s", ours=f"{ours:.2f} s",
    ))  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
