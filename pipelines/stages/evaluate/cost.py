"""Cost estimates of the suites of a recipe: forward passes, FLOPs, hours; no weights are read.

Passes count once per image and model; a step of an attack is a pass with the gradient of its
pixels, which costs two. Passes have `micro_batch` rows, and the last one of a unit is padded.
Corruptions also cost CPU time, once for all models.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from components.attacks.spatial import grid_poses
from components.core.errors import CasemateError
from components.core.pass_counts import ascent
from components.data.sources import find_source
from components.evaluate.settings import PREPARED, TransferSuiteSettings
from components.evaluate.shape_bias import PUBLISHED_COUNTS
from pipelines.recipe.costs import CostedNetwork, Lab, Question, Row, Speed, StepCost, Work
from pipelines.recipe.facts import known_side
from pipelines.recipe.model_costs import (
    folder_costs,
    known_test_items,
    model_cost,
    num_test_items,
    pass_memory,
)
from pipelines.recipe.schema.evaluate import CLEAN, EvaluateSection, suite_of
from pipelines.recipe.schema.recipe import Recipe

GRADIENT = ascent(1).cost  # of a pass with its gradient, in passes
ITEMS_PER_UNIT = 100  # as in `evaluation.py`, which needs workers
NUM_VARIANTS = 95
CORRUPTION_SECONDS = 0.12  # CPU time of all 95 variants of an image of 224 pixels: make bench
SIDE = 224
FILES = 3  # predictions.parquet, metrics.parquet, summary.json
ROW_BYTES = 60  # of an item and a model in the results


@dataclass(frozen=True, slots=True)
class SuiteWork:
    """Passes per model, on average, and how many there are at least."""

    num_items: int
    passes: int  # without gradient
    gradients: int = 0  # passes with a gradient
    least_share: float = 1.0  # of the passes, if items stop early
    cpu_seconds: float = 0.0  # for all models together
    num_variants: int = 0  # of corruptions that are made here


def costs_of(recipe: Recipe, asked: Question) -> list[StepCost]:
    """One step per suite: items, passes, FLOPs, CPU seconds, memory.

    What nobody wrote into the recipe is left out while the number of test items is unknown.
    """
    section = recipe.evaluation()
    if section is None or (
        recipe.evaluate is None and known_test_items(recipe, section.subset, asked) is None
    ):
        return []
    works = dict(_works(recipe, section, asked))
    found = []
    for part, names in recipe.evaluation_parts().items():
        suite = suite_of(part)
        models = [model_cost(recipe, name) for name in names]
        models += _other_models(section.transfer) if suite == "transfer" else []
        step, size = f"evaluate.{part}", section.micro_batch
        found.append(step_cost(step, works[suite], models, asked, micro_batch=size, recipe=recipe))
    return found


def step_cost(
    step: str,
    work: SuiteWork,
    models: Sequence[CostedNetwork],
    asked: Question,
    *,
    micro_batch: int,
    recipe: Recipe,
) -> StepCost:
    """The cost of one step: `work` of each of these models."""
    padding = padded_share(work.num_items, micro_batch)
    works = [
        _work(step, work, model, recipe, asked, padding, number)
        for number, model in enumerate(models)
    ]
    passes, count = work.passes * len(models), len(models)
    own: Row = {
        "num_models": count,
        "passes": passes,
        "least_passes": round(passes * work.least_share),
        "gradients": work.gradients * count,
        "cpu_seconds": work.cpu_seconds,
    }
    return StepCost(
        step=step,
        num_items=work.num_items,
        works=works,
        memory=max(pass_memory(model, micro_batch, "fp32") for model in models),
        storage=ROW_BYTES * passes,
        objects=FILES,
        assumed=["from no to all items end early"] if work.least_share < 1 else [],
        own=own,
    )


def _work(
    step: str,
    work: SuiteWork,
    model: CostedNetwork,
    recipe: Recipe,
    asked: Question,
    padding: float,
    number: int,
) -> Work:
    most = padding * (work.passes + GRADIENT * work.gradients)
    low, high = asked.between(work.least_share * most, most)
    first = number == 0  # images are corrupted once for all models
    return Work(
        what=f"model {number + 1}",
        most=high,
        least=low,
        flops=model.flops,
        net=model.net,
        probe=_probe(recipe, step, number),
        cpu_seconds=work.cpu_seconds if first else 0.0,
        cpu_probe=lambda lab: lab.corrupting(recipe, work.num_items),
    )


def _probe(recipe: Recipe, step: str, number: int) -> Callable[[Lab], Speed]:
    return lambda lab: lab.passes(recipe, step, number)


def padded_share(num_items: int, micro_batch: int) -> float:
    """Rows that are computed for each item: the last pass of a unit is filled up."""
    if not num_items:
        return 1.0
    num_units = -(-num_items // ITEMS_PER_UNIT)
    size = num_items / num_units
    return -(-size // micro_batch) * micro_batch / size


def _works(
    recipe: Recipe, section: EvaluateSection, asked: Question
) -> Iterator[tuple[str, SuiteWork]]:
    """The work of every suite, for one model."""
    count = num_test_items(recipe, section.subset, asked, key="evaluate")
    side = known_side(recipe.data) or SIDE
    for suite in section.suites():
        if suite == CLEAN:
            yield suite, SuiteWork(count, count)
        elif section.corruptions and suite == "corruptions":
            num_variants = len(section.corruptions.variants())
            share = num_variants / NUM_VARIANTS * (side / SIDE) ** 2
            made = section.corruptions.source == "generate"
            seconds = CORRUPTION_SECONDS * count * share if made else 0.0
            yield (
                suite,
                SuiteWork(
                    count,
                    num_variants * count,
                    cpu_seconds=seconds,
                    num_variants=num_variants if made else 0,
                ),
            )
        elif suite == "shifts":
            shifted = sum(_shifted_items(name, section) for name in section.shifts)
            yield suite, SuiteWork(shifted, shifted + count)
        elif suite == "shape_bias":
            yield suite, SuiteWork(PUBLISHED_COUNTS[0], PUBLISHED_COUNTS[0])
        elif section.transfer and suite == "transfer":
            yield suite, _transfer(recipe, section.transfer, count)
        elif section.spatial and suite == "spatial":
            num_items = min(count, section.spatial.max_items)
            poses = len(grid_poses(section.spatial.grid_at(side)))
            least = 1 / poses if section.spatial.early_exit else 1.0
            yield suite, SuiteWork(num_items, num_items * poses, least_share=least)


def _transfer(recipe: Recipe, how: TransferSuiteSettings, count: int) -> SuiteWork:
    """Perturbations of each model once, each evaluated on all models."""
    num_items = min(count, how.max_items)
    num_models = len(recipe.evaluated_models()) + len(how.models)
    steps = sum(1 if attack == "fgsm" else how.num_steps for attack in how.attacks)
    passes = num_items * (len(how.attacks) * num_models + 1)
    return SuiteWork(num_items, passes, gradients=num_items * steps)


def _shifted_items(name: str, section: EvaluateSection) -> int:
    """Items of a shifted dataset: as limited, as prepared, or as published."""
    shift = section.shifts[name]
    found = shift.num_items
    if shift.source == PREPARED:
        from components.data.stream import read_document

        place = Path(shift.path or "").expanduser() / "dataset.json"
        if place.is_file():
            stored = int(read_document(place)["splits"]["test"]["num_items"])
            return min(found or stored, stored)
    elif (published := find_source(shift.source).with_options(shift.options).num_items) is not None:
        return min(found or published, published)
    if found is None:
        key = f"evaluate.shifts.{name}.num_items"
        raise CasemateError(key, None, f"is open; add --set {key}=N")
    return found


def _other_models(how: TransferSuiteSettings | None) -> list[CostedNetwork]:
    return folder_costs("evaluate.transfer.models", how.models if how else {})
