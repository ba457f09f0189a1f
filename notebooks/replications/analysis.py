"""Inside small ViTs: lesions, correlation of blocks, restricted attention, perturbations.

Reads finished runs of the models of `evaluation.py`, one per seed, on digits and on photographs,
keeps their numbers in `analysis.jsonl` and makes the page from that file:
`python -m notebooks.replications.analysis`. With `--run` missing runs are made first. The
photographs are an npz file of CIFAR-10, named by the variable `CASEMATE_PHOTOS`.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from components.evaluate.metrics import ALL, METRICS_NAME, MetricRow, read_metrics
from notebooks.replications import page
from notebooks.replications.analysis_findings import experiments_of
from notebooks.replications.analysis_measures import (
    GENERATORS,
    JUDGES,
    NOISE,
    PARTS,
    SIGNS,
    STUDIES,
    VITS,
    Lines,
    clean,
)
from notebooks.replications.evaluation import RECIPE, recipe_of
from notebooks.replications.evaluation_findings import DIGITS, MODELS, PHOTOS
from notebooks.replications.experiments import Experiment
from notebooks.replications.runs import Line, Study, command, finished, value_of
from pipelines.flow.plan import plan
from pipelines.flow.run import run_flow

INTRODUCTION = """# Published findings on the inside of ViTs, in miniature

Made by `python -m notebooks.replications.analysis` from [analysis.jsonl](analysis.jsonl), the numbers of {seeds} runs on each
kind of images; do not edit. Papers: Bhojanapalli et al. 2021, Understanding robustness of transformers for image
classification (sections 3.5 and 4); the thesis Adversarially robust vision transformers (section 4.3).

The models are those of the recipe `{recipe}`. Digits: `mnist5k` padded to 32x32
pixels, 2500 training and 500 test items. Photographs: CIFAR-10, 4000 training and 1000 test items. Every ViT has
**{depth} blocks** and a class token and starts from random weights; those of the paper have 12 or 24 blocks and are
pre-trained. A block is a quarter of such a network, "early" and "late" are two blocks each, and of n blocks
other than the first there are at most three sets, so that all are used instead of 25 samples.

Parts are removed and attention is restricted at inference only. A figure is the mean over {seeds} seeds with its 95 %
t-interval ({freedom} degrees of freedom, not clipped to 0 and 100); a difference is taken seed by seed. Correlations are in
hundredths. [training.md](training.md) defines *reproduced*, *the opposite* and *not decided*, and explains why networks this
small say little about the published ones. The first comparison of a finding is on the standard ViT that is more accurate on
clean items: that with patches of 4 px on photographs, of 8 px on digits. The {comparisons} comparisons were fixed before the
runs; among so many, a few are decided by chance.

Weights, and clean accuracy on test items, %, of all models; chance is 10:

{accuracies}

## In short
"""


def run(storage: Path, seed: int) -> None:
    """Run the missing steps on both kinds of images."""
    for data in (DIGITS, PHOTOS):
        for stage, change in STUDIES[data].values():
            run_flow(recipe_of(seed, data, [change]), storage=storage, until=stage)


def collect(storage: Path, seed: int) -> list[Line]:
    """The numbers of a seed: one line per kind of images and model, and one of noise."""
    return [line for data in (DIGITS, PHOTOS) for line in _collect(storage, seed, data)]


def _collect(storage: Path, seed: int, data: str) -> list[Line]:
    rows = {study: _rows(storage, seed, data, study) for study in STUDIES[data]}
    noise = {"seed": seed, "data": data, "model": NOISE}
    noise["perturbations"] = _rounded(_perturbations(rows.pop(NOISE)))
    known = [row for found in rows.values() for row in found]
    lines = [_line(seed, data, model, [r for r in known if r.model == model]) for model in MODELS]
    return [*lines, noise]


def _rows(storage: Path, seed: int, data: str, study: str) -> list[MetricRow]:
    stage, change = STUDIES[data][study]
    steps = plan(recipe_of(seed, data, [change]), storage)
    folders = [finished(step) for step in steps if step.step.stage == stage]
    return [row for folder in folders for row in read_metrics(folder / METRICS_NAME)]


def _line(seed: int, data: str, model: str, rows: Sequence[MetricRow]) -> Line:
    """Numbers of all studies that a model takes part in, rounded to 6 digits."""
    line: Line = {"seed": seed, "data": data, "model": model}
    (line["params_m"],) = {row.params_m for row in rows}
    line["clean"] = value_of(rows, "clean", ALL, "accuracy")
    if model in VITS[data]:
        line["lesions"] = _lesions(rows)
        line["correlation"] = _correlation(rows)
        line["attention"] = _attention(rows)
    if model in GENERATORS:
        line["perturbations"] = _perturbations(rows)
    return {key: _rounded(value) for key, value in line.items()}


def _lesions(rows: Sequence[MetricRow]) -> dict[str, Any]:
    """Accuracy of the whole network, without a part of block i, and of n blocks at once."""
    suite = "lesions"
    found: dict[str, Any] = {"whole": value_of(rows, suite, "none", "accuracy")}
    for part in PARTS:
        found[part] = {
            "single": _levels(rows, suite, part, "single_accuracy"),
            "several": _levels(rows, suite, part, "mean_accuracy"),
        }
    return found


def _correlation(rows: Sequence[MetricRow]) -> dict[str, list[float]]:
    """Correlation of each block with the next one."""
    depth = len(_levels(rows, "lesions", "block", "single_accuracy"))
    return {
        tokens: [
            value_of(rows, "correlation", f"{tokens}/{i}-{j}", "pearson_flat")
            for i, j in pairwise(range(depth))
        ]
        for tokens in ("all", "cls")
    }


def _attention(rows: Sequence[MetricRow]) -> dict[str, list[float]]:
    """Accuracy by distance, and by the number of restricted blocks."""
    kinds = ("spatial", "random", "cls_first", "cls_last")
    return {kind: _levels(rows, "restricted_attention", kind, "accuracy") for kind in kinds}


def _perturbations(rows: Sequence[MetricRow]) -> dict[str, Any]:
    """Patch alignment, and the share of pictures that each judge recognises."""
    suite = "perturbations"
    found = {"alignment": value_of(rows, suite, "patch_alignment", "score")}
    for judge in JUDGES:
        for sign in SIGNS:
            item = f"{judge}/{sign}"
            found[item] = value_of(rows, suite, item, "top1_accuracy")
    return found


def _levels(rows: Sequence[MetricRow], suite: str, item: str, metric: str) -> list[float]:
    """The numbers of all levels, the lowest first."""
    wanted = [r.level for r in rows if (r.suite, r.item, r.metric) == (suite, item, metric)]
    levels = sorted(level for level in wanted if level is not None)
    return [value_of(rows, suite, item, metric, level=level) for level in levels]


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_rounded(part) for part in value]
    return round(value, 6) if isinstance(value, float) else value


def experiments(lines: Sequence[Line]) -> list[Experiment]:
    """Every finding on photographs, then on digits."""
    return [one for data in (PHOTOS, DIGITS) for one in experiments_of(Lines(lines, data))]


def render(lines: Sequence[Line]) -> str:
    """The whole page."""
    seeds = len({line["seed"] for line in lines})
    found = experiments(lines)
    intro = INTRODUCTION.format(
        recipe=RECIPE,
        seeds=seeds,
        freedom=seeds - 1,
        depth=Lines(lines, PHOTOS).depth,
        comparisons=sum(len(one.contrasts) for one in found),
        accuracies=page.markdown(_accuracies(lines)).strip(),
    )
    picture = "![Every comparison with its interval](analysis.svg)"
    return "\n".join([intro, *page.findings(found, picture=picture)])


def _accuracies(lines: Sequence[Line]) -> pd.DataFrame:
    """One row per model."""
    return pd.DataFrame(
        {"model": name, "weights": _weights(lines, model)}
        | {data: str(Lines(lines, data).estimate(model, clean)) for data in (PHOTOS, DIGITS)}
        for model, name in MODELS.items()
    )


def _weights(lines: Sequence[Line], model: str) -> str:
    """In thousands: digits have one channel, photographs three."""
    found = {round(1000 * one["params_m"]) for one in lines if one["model"] == model}
    return " to ".join(f"{count},000" for count in sorted(found))


def draw(lines: Sequence[Line]) -> Figure:
    return page.differences_figure(experiments(lines))


STUDY = Study(name="analysis", run=run, collect=collect, render=render, draw=draw)

if __name__ == "__main__":
    command(STUDY, description=__doc__)
