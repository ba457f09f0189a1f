"""Denoised smoothing in miniature: noise levels, samplers, denoisers, classifiers.

Reads finished runs of the recipe `dds-mnist5k-mini`, one per seed, keeps their counts in
`denoised.jsonl` and makes the page from that file: `python -m notebooks.replications.denoised`.
With `--run` missing runs are made first.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from components.certify.l2.noise import noisy_draws
from components.certify.vote_rows import VOTES_NAME
from components.certify.votes import read_votes
from components.core.seeding import DrawSpan
from components.core.settings import plain
from components.data.prepared import PreparedDataset
from components.denoising.loading import load_denoised, source_of
from notebooks.replications.denoised_findings import REGIMES, SIGMAS, STEP
from notebooks.replications.denoised_page import TUNING_EPOCHS, draw, render
from notebooks.replications.runs import Line, Study, certificates, command, finished
from pipelines.flow.plan import PlannedStep, plan
from pipelines.flow.run import run_flow
from pipelines.recipe.load import load, with_values
from pipelines.recipe.schema.recipe import Recipe

RECIPE = "dds-mnist5k-mini"


def base_recipe(seed: int) -> Recipe:
    return load(RECIPE, overrides=[f"seed={seed}"])


def full_recipe(seed: int, storage: Path) -> Recipe:
    """The recipe with classifiers that start from its finished one, and one without a denoiser.

    A recipe cannot start one of its models from another, and a ready recipe should not certify a
    classifier under noise that it was not trained on.
    """
    base = base_recipe(seed)
    steps = {step.name: step for step in plan(base, storage)}
    start = {"pretrained": str(finished(steps["train.main"]) / "model")}
    further = {"epochs": TUNING_EPOCHS, "model": plain(base.model) | start}
    values: dict[str, Any] = {
        "train.variants.longer": further | {"objective": {"kind": "standard"}},
    }
    for end, sigma in SIGMAS.items():
        objective = {"kind": "denoised", "sigma": sigma, "denoiser": "full"}
        section = plain(base.certify[f"plain-{end}"])
        values |= {
            f"train.variants.tuned{end}": further | {"objective": objective},
            f"certify.tuned-{end}": section | {"model": f"tuned{end}"},
            f"certify.bare-{end}": section | {"denoiser": None},
        }
    section = plain(base.certify["plain-050"])
    return with_values(base, values | {"certify.longer-050": section | {"model": "longer"}})


def run(storage: Path, seed: int) -> None:
    """Run the missing steps: first the models that others start from, then everything."""
    run_flow(base_recipe(seed), storage=storage, until="train")
    run_flow(full_recipe(seed, storage), storage=storage, until="certify")


def collect(storage: Path, seed: int) -> list[Line]:
    """The counts of a finished run: one line per certificate, one per denoiser and noise level."""
    recipe = full_recipe(seed, storage)
    found = [_certificate(seed, *parts) for parts in certificates(recipe, storage)]
    steps = {step.name: step for step in plan(recipe, storage)}
    return [*found, *_single_draws(seed, steps)]


def _certificate(seed: int, step: PlannedStep, folder: Path, document: Mapping[str, Any]) -> Line:
    section, settings = step.step.identity["certify"], document["evidence"]["settings"]
    rows = pq.read_table(folder / "certificates.parquet", columns=["correct", "radius"])
    correct, radius = (np.asarray(rows[name]) for name in ("correct", "radius"))
    levels = np.arange(0, document["summary"]["max_radius"], STEP)
    items = read_votes(folder / VOTES_NAME).items()
    return {
        "seed": seed,
        "certificate": step.step.part,
        "sigma": settings["sigma"],
        "num_select": settings["num_select"],
        "num_estimate": settings["num_estimate"],
        "failure_prob": section["failure_prob"],
        "num_items": document["summary"]["num_items"],
        "right_draws": int(sum((item.streams["estimate"] == item.label).sum() for item in items)),
        "certified": [int((correct & (radius >= level)).sum()) for level in levels],
    }


@torch.inference_mode()
def _single_draws(seed: int, steps: Mapping[str, PlannedStep]) -> Iterator[Line]:
    """One noisy copy of every test item, denoised and classified (Carlini et al. 2023, Table 4).

    The copies are the same for every denoiser.
    """
    items = PreparedDataset.open(finished(steps["prepare"])).load("test")
    classifier = finished(steps["train.main"]) / "model"
    images, labels = items.pixels(), items.labels
    for sigma in SIGMAS.values():
        copies = [
            noisy_draws(image, DrawSpan(seed, "single", item, 0, 1), sigma=sigma)
            for image, item in zip(images, items.item_ids, strict=True)
        ]
        for denoiser in REGIMES:
            model = load_denoised(
                classifier,
                source_of(finished(steps[f"train.{denoiser}"]) / "model"),
                sampler={"kind": "one-shot"},
                image_size=images.shape[-1],
                sigma=sigma,
            )
            right = int((model(torch.cat(copies)).argmax(dim=1) == labels).sum())
            where = {"seed": seed, "denoiser": denoiser, "sigma": sigma}
            yield where | {"num_items": len(labels), "right": right}


STUDY = Study(name="denoised", run=run, collect=collect, render=render, draw=draw)

if __name__ == "__main__":
    command(STUDY, description=__doc__)
