"""`make bench`: how many draws sequential certificates need, and whether they say the same.

The demo's noisy model and test images. Every image is certified at one declared radius with
`method: sequential` and at most 100,000 draws; the first ones of them also with all 100,000, from
the same stream of noise. Printed: mean draws used, certified accuracies, and the images on which
the two verdicts differ (their probability is close to what the radius needs).

`python -m tests.benchmarks.sequential STORAGE` reads a finished demo there; without it the model
is trained first.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from components.certify.header import ImageShape, VotesHeader
from components.certify.l2.claims import certify_counts
from components.certify.l2.draws import DrawLedger
from components.certify.l2.evidence import declare
from components.certify.l2.settings import GaussianSettings
from components.certify.l2.voters import Block, GaussianVoter, GaussianVoteSettings
from components.certify.tasks import VoteTask
from components.core.noise_streams import noise_impl
from pipelines.recipe.load import load
from tests.benchmarks.table import promise

LIMIT = 0.03  # of the draws of a fixed number, on average over the test images
RADIUS, SIGMA, DRAWS = 0.3, 0.25, 100_000
SEED = 7


def places(storage: Path) -> tuple[Path, Path]:
    """The demo's dataset and the model that it trains under noise."""
    (data,) = storage.glob("*/prepare-*")
    (model,) = storage.glob("*/train.noisy-*/model")
    return data, model


def train_demo(storage: Path) -> None:
    from pipelines.flow.run import run_flow

    plain = ["attack={}", "certify={}", "tune=null", "train.objective={kind: standard}"]
    variants = "train.variants={noisy: {objective: {kind: gaussian, sigma: 0.25}}}"
    run_flow(load("demo", overrides=[*plain, variants]), storage=storage, until="train")


def votes_of(section: GaussianSettings) -> GaussianVoteSettings:
    declared = declare(
        radii=list(section.radii), failure_prob=section.failure_prob,
        look_every=section.look_every, futility_prob=section.futility_prob,
    )  # fmt: skip
    return GaussianVoteSettings(
        kind="gaussian", micro_batch=section.micro_batch, device="cpu", sigma=SIGMA,
        num_select=section.num_select, num_estimate=DRAWS, run_seed=SEED, method="sequential",
        declared=declared,
    )  # fmt: skip


def header_of(section: GaussianSettings, num_items: int) -> VotesHeader:
    return VotesHeader(
        kind="gaussian", run_id="bench", model_digest="", dataset_digest="", num_classes=10,
        image=ImageShape(1, 32, 32), settings=votes_of(section).to_dict(),
        noise_impl=noise_impl("sequential"), num_items=num_items, software={},
    )  # fmt: skip


def sequential(voter: GaussianVoter, ledger: DrawLedger) -> list[dict[str, Any]]:
    """One row per image: draws used and the verdict at the radius."""
    while todo := ledger.next(1, ahead=1):
        for unit in todo:
            ledger.keep(unit, ledger.brief(voter(unit.payload)))
    return [
        {"item_id": item.item_id, "used": item.used, "certified": item.certified}
        for item in ledger.items
    ]


def fixed(voter: GaussianVoter, index: int) -> tuple[bool, float]:
    """Certified rightly from all draws, and the share of draws that agreed."""
    item = voter.items.span(index, index + 1)
    select, estimate = (
        np.bincount(voter.predictions(item, Block(index, stream, 0, stop)), minlength=10)
        for stream, stop in (("select", 100), ("estimate", DRAWS))
    )
    claim = certify_counts(select, estimate, sigma=SIGMA, alpha=0.001)
    right = claim.prediction == int(item.labels[0]) and claim.radius >= RADIUS
    return right, claim.k / claim.n


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("storage", nargs="?", type=Path, help="of a finished demo")
    parser.add_argument("--items", type=int, help="test images; default: all")
    parser.add_argument("--compared", type=int, default=20, help="also with all draws")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        if given.storage is None:
            train_demo(Path(name) / "runs")
        data, model = places(given.storage or Path(name) / "runs")
        section = GaussianSettings(
            kind="gaussian", sigma=SIGMA, method="sequential", radii=(RADIUS,),
            num_estimate=DRAWS, micro_batch=64, block_size=1024,
        )  # fmt: skip
        voter = GaussianVoter(VoteTask(data, model, votes_of(section)))
        num_items = min(given.items or len(voter.items), len(voter.items))
        rows = sequential(voter, DrawLedger(section, header_of(section, num_items)))
        compared = [fixed(voter, i) for i in range(min(given.compared, num_items))]
    used = np.array([row["used"] for row in rows])
    pairs = list(zip(rows, compared, strict=False))
    differ = [
        {"item": row["item_id"], "share_that_agrees": share, "used": row["used"]}
        for row, (certified, share) in pairs
        if certified != row["certified"]
    ]
    print(json.dumps({
        "benchmark": f"draws of sequential certificates at radius {RADIUS}, sigma {SIGMA}",
        "items": num_items,
        "mean_draws": float(used.mean()), "median_draws": float(np.median(used)),
        "share_of_100000": float(used.mean()) / DRAWS, "limit": LIMIT,
        "certified_accuracy": float(np.mean([row["certified"] for row in rows])),
        "compared_items": len(pairs),
        "certified_sequential": sum(row["certified"] for row, _ in pairs),
        "certified_fixed": sum(certified for _, (certified, _) in pairs),
        "borderline_items": differ,
    }))  # fmt: skip
    return int(not promise(
        f"draws of sequential certificates, share of {DRAWS}", ratio=float(used.mean()) / DRAWS,
        at_most=LIMIT, peer=f"fixed {DRAWS}", ours=f"{used.mean():.1f}",
    ))  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
