"""What ViTs and ResNets withstand, in miniature: corruptions, perturbations, rotations and shifts.

Reads finished runs of the recipe `uvit-mnist5k-mini`, one per seed, on digits and on photographs,
keeps their numbers in `evaluation.jsonl` and makes the page from that file:
`python -m notebooks.replications.evaluation`. With `--run` missing runs are made first. The
photographs are an npz file of CIFAR-10, named by the variable `CASEMATE_PHOTOS`.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from components.core.errors import CasemateError
from components.evaluate.metrics import ALL, METRICS_NAME, MetricRow, read_metrics
from notebooks.replications import page
from notebooks.replications.evaluation_findings import DIGITS, MODELS, PHOTOS, Lines, experiments_of
from notebooks.replications.experiments import Experiment
from notebooks.replications.runs import Line, Study, command, finished, value_of
from pipelines.flow.plan import plan
from pipelines.flow.run import run_flow
from pipelines.recipe.load import load
from pipelines.recipe.schema.recipe import Recipe

RECIPE = "uvit-mnist5k-mini"
PHOTOS_ENV = "CASEMATE_PHOTOS"
GROUPS = ("noise", "blur", "weather", "digital")

INTRODUCTION = """# Published findings on what ViTs and ResNets withstand, in miniature

Made by `python -m notebooks.replications.evaluation` from [evaluation.jsonl](evaluation.jsonl), the numbers of {seeds} runs of
the recipe `{recipe}` on each kind of images; do not edit. Paper: Bhojanapalli et al. 2021, Understanding robustness of
transformers for image classification.

Digits: `mnist5k` padded to 32x32 pixels, 2500 training and 500 test items. Photographs: CIFAR-10, 4000 training and 1000 test
items. The ViTs have about 0.2 (patches of 4 px) and 0.46 million weights, the ResNets 0.08 and 0.02. They start from random
weights and learn little: 35 to 43 % of the photographs without an attack, and 57 % of the digits for the ViT with patches of
4 px, 96 % for the ResNet. The paper's are pre-trained, and its figures here are those of pre-training on ILSVRC-2012 alone.
Corruptions have the constants of CIFAR-10-C. A figure is the mean over {seeds} seeds with its 95 % t-interval ({freedom} degrees of
freedom, not clipped to 0 and 100); a difference is taken seed by seed. Comparisons by the share of the clean accuracy were
added after the first look at the results, because losses in points mostly follow the clean accuracy; all others are as they
were planned. [training.md](training.md) defines *reproduced*, *the opposite* and *not decided*, and explains why networks
this small say little about the published ones.

## In short
"""


def recipe_of(seed: int, data: str, changes: Sequence[str] = ()) -> Recipe:
    """The ready recipe on digits, or on photographs with the budgets of photographs; `changes`
    are further overrides.
    """
    if data == DIGITS:
        return load(RECIPE, overrides=[f"seed={seed}", *changes])
    path = os.environ.get(PHOTOS_ENV)
    if not path:
        remedy = "is not set: name an npz file with x_train, y_train, x_test, y_test of CIFAR-10"
        raise CasemateError(PHOTOS_ENV, "", remedy)
    limits = "{train: 4000, val: 500, test: 1000}"
    overrides = [
        f"seed={seed}",
        "name=uvit-cifar-mini",
        f"data={{source: npz, path: '{path}', split_seed: 7, limits: {limits}}}",
        "train.augment={crop: pad, pad: 4, flip: true}",
        *(f"train.variants.{m}-robust.objective.eps=4/255" for m in ("vit", "resnet")),
        "evaluate.transfer.eps=1/255",
        *changes,
    ]
    return load(RECIPE, overrides=overrides)


def run(storage: Path, seed: int) -> None:
    """Run the missing steps on both kinds of images."""
    for data in (DIGITS, PHOTOS):
        run_flow(recipe_of(seed, data), storage=storage, until="evaluate")


def collect(storage: Path, seed: int) -> list[Line]:
    """The accuracies of a seed: one line per kind of images and model."""
    return [line for data in (DIGITS, PHOTOS) for line in _collect(storage, seed, data)]


def _collect(storage: Path, seed: int, data: str) -> list[Line]:
    rows: list[MetricRow] = []
    for step in plan(recipe_of(seed, data), storage):
        if step.step.stage == "evaluate":
            rows += read_metrics(finished(step) / METRICS_NAME)
    return [_line(seed, data, model, [r for r in rows if r.model == model]) for model in MODELS]


def _line(seed: int, data: str, model: str, rows: Sequence[MetricRow]) -> Line:
    """Shares of items, rounded to 6 digits; the row of a transfer is that of the target."""
    found = {
        "clean": value_of(rows, "clean", ALL, "accuracy"),
        "mean75": value_of(rows, "corruptions", ALL, "mean75"),
        "mean95": value_of(rows, "corruptions", ALL, "mean95"),
        **{name: value_of(rows, "corruptions", ALL, f"mean_{name}") for name in GROUPS},
        "fog and contrast": _mean(
            row.value
            for row in rows
            if row.suite == "corruptions"
            and row.item in ("fog", "contrast")
            and row.metric == "accuracy"
        ),
        "clean, transfer": value_of(rows, "transfer", "clean", "accuracy"),
    }
    for kind in ("fgsm", "pgd"):
        for source in MODELS:
            key = f"{kind}, own" if source == model else f"{kind} of {source}"
            found[key] = value_of(rows, "transfer", f"{kind}/{source}", "accuracy")
        found[f"{kind} of {model}"] = found[f"{kind}, own"]
    (grid,) = {row.item for row in rows if row.suite == "spatial" and "x" in row.item}
    found["clean, spatial"] = value_of(rows, "spatial", grid, "clean_accuracy")
    found["spatial"] = value_of(rows, "spatial", grid, "accuracy")
    where = {"seed": seed, "data": data, "model": model}
    return where | {"accuracy": {key: round(value, 6) for key, value in found.items()}}


def _mean(values: Iterable[float | None]) -> float:
    found = [value for value in values if value is not None]
    return sum(found) / len(found)


def experiments(lines: Sequence[Line]) -> list[Experiment]:
    """Every finding on photographs, then on digits."""
    return [one for data in (PHOTOS, DIGITS) for one in experiments_of(Lines(lines, data))]


def render(lines: Sequence[Line]) -> str:
    """The whole page."""
    seeds = len({line["seed"] for line in lines})
    intro = INTRODUCTION.format(recipe=RECIPE, seeds=seeds, freedom=seeds - 1)
    picture = "![Every comparison with its interval](evaluation.svg)"
    return "\n".join([intro, *page.findings(experiments(lines), picture=picture)])


def draw(lines: Sequence[Line]) -> Figure:
    return page.differences_figure(experiments(lines))


STUDY = Study(name="evaluation", run=run, collect=collect, render=render, draw=draw)

if __name__ == "__main__":
    command(STUDY, description=__doc__)
