"""Cost estimates of the suites of a recipe: forward passes, FLOPs, hours; no weights are read.

Passes count once per image and model. A step of an attack is a pass with a gradient, three times
the FLOPs of one without. Corruptions also cost CPU time, once for all models.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.attacks.spatial import grid_poses
from components.certify.estimate import Rate, Work, device_bytes, estimate
from components.core.errors import CasemateError
from components.data.sources import find_source
from components.evaluate.settings import PREPARED, SubsetSettings, TransferSuiteSettings
from components.evaluate.shape_bias import PUBLISHED_COUNTS
from components.models.spec import ABSENT_KEYS
from pipelines.recipe.costs import NUM_CLASSES, CostedNetwork, Hardware, Row, hours_at, image_side
from pipelines.recipe.facts import given_spec, known_channels, known_side, source_info, spec_of
from pipelines.recipe.schema.evaluate import CLEAN, EvaluateSection, suite_of
from pipelines.recipe.schema.recipe import Recipe

MACS = 2  # FLOPs of a multiply-accumulate
GRADIENT = 3  # cost of a pass with its gradient, in passes
NUM_VARIANTS = 95
CORRUPTION_SECONDS = 0.12  # CPU time of all 95 variants of an image of 224 pixels: make bench
SIDE = 224


@dataclass(frozen=True, slots=True)
class SuiteWork:
    """Passes per model, on average, and how many there are at least."""

    num_items: int
    passes: int  # without gradient
    gradients: int = 0  # passes with a gradient
    least_share: float = 1.0  # of the passes, if items stop early
    cpu_seconds: float = 0.0  # for all models together


def estimates_of(recipe: Recipe, hardware: Hardware, *, num_items: int | None) -> list[Row]:
    """One row per step: items, passes, FLOPs, CPU seconds, hours at each place, memory.

    What nobody wrote into the recipe is left out while the number of test items is unknown.
    """
    section = recipe.evaluation()
    if section is None or (
        recipe.evaluate is None and known_test_items(recipe, section.subset, num_items) is None
    ):
        return []
    works = dict(_works(recipe, section, given=num_items))
    rows = []
    for part, names in recipe.evaluation_parts().items():
        suite = suite_of(part)
        models = [model_cost(recipe, name) for name in names]
        models += _other_models(section.transfer) if suite == "transfer" else []
        step, size = f"evaluate.{part}", section.micro_batch
        rows.append(estimate_row(step, works[suite], models, hardware, micro_batch=size))
    return rows


def estimate_row(
    step: str,
    work: SuiteWork,
    models: Sequence[CostedNetwork],
    hardware: Hardware,
    *,
    micro_batch: int,
) -> Row:
    """The row of one step: `work` of each of these models."""
    flops = sum(
        MACS * model.costs.flops * (work.passes + GRADIENT * work.gradients) for model in models
    )
    passes = work.passes * len(models)
    mean = MACS * sum(model.costs.flops for model in models) / len(models)
    rates = hardware.rates([model.net for model in models], flops_per_pass=mean)
    memory = max(_memory(model, micro_batch, hardware.dtype) for model in models)
    num_workers = hardware.num_workers
    return {
        "step": step,
        "num_items": work.num_items,
        "num_models": len(models),
        "passes": passes,
        "least_passes": round(passes * work.least_share),
        "gradients": work.gradients * len(models),
        "flops": flops,
        "cpu_seconds": work.cpu_seconds,
        "device_bytes": memory,
        "num_workers": num_workers,
        "hours": [
            _hours(where, rate, flops, work, num_workers, memory) for where, rate in rates.items()
        ],
    }


def _hours(
    where: str, rate: Rate, flops: float, work: SuiteWork, num_workers: int, memory: int
) -> Row:
    found = estimate(Work(1, 1, flops), rate, num_workers=num_workers, least_share=work.least_share)
    return hours_at(where, found, memory=memory, further=work.cpu_seconds / num_workers / 3600)


def _works(
    recipe: Recipe, section: EvaluateSection, *, given: int | None
) -> Iterator[tuple[str, SuiteWork]]:
    """The work of every suite, for one model."""
    count = num_test_items(recipe, section.subset, given, key="evaluate")
    side = known_side(recipe.data) or SIDE
    for suite in section.suites():
        if suite == CLEAN:
            yield suite, SuiteWork(count, count)
        elif section.corruptions and suite == "corruptions":
            num_variants = len(section.corruptions.variants())
            share = num_variants / NUM_VARIANTS * (side / SIDE) ** 2
            made = section.corruptions.source == "generate"
            seconds = CORRUPTION_SECONDS * count * share if made else 0.0
            yield suite, SuiteWork(count, num_variants * count, cpu_seconds=seconds)
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


def num_test_items(recipe: Recipe, subset: SubsetSettings, given: int | None, *, key: str) -> int:
    """Items of a subset; an error if the data must be read to know."""
    known = known_test_items(recipe, subset, given)
    if known is None:
        raise CasemateError(
            f"{key}.subset.num_items", "", "is not known without the data; give --items N"
        )
    return known


def known_test_items(recipe: Recipe, subset: SubsetSettings, given: int | None) -> int | None:
    """Items of a subset, as far as it is known without the data."""
    chosen = len(subset.item_ids) if subset.item_ids else subset.num_items
    published = (source_info(recipe.data).splits or {}).get("test")
    return min(
        (n for n in (chosen, given, recipe.data.limits.get("test"), published) if n), default=None
    )


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


def model_cost(recipe: Recipe, name: str) -> CostedNetwork:
    """A model of the recipe: from its section, or from the folder of a given one."""
    if recipe.given_model():
        spec = given_spec(recipe)
        if spec is None:
            remedy = "is not on this machine: what it costs is unknown; estimate where it is"
            raise CasemateError("model.pretrained", recipe.model.pretrained, remedy)
        return _of_spec(spec)
    section, side = recipe.model_of(name), image_side(recipe)
    return CostedNetwork.of(
        section.architecture,
        side=section.upsample or side,
        channels=known_channels(recipe.data) or 3,
        num_classes=source_info(recipe.data).num_classes or NUM_CLASSES,
        options=section.options,
    )


def _other_models(how: TransferSuiteSettings | None) -> list[CostedNetwork]:
    return folder_costs("evaluate.transfer.models", how.models if how else {})


def folder_costs(key: str, folders: Mapping[str, str]) -> list[CostedNetwork]:
    """The models of these folders; `key` is the one that names them in a recipe."""
    found = []
    for name, folder in folders.items():
        spec = spec_of(Path(folder).expanduser())
        if spec is None:
            remedy = "is not on this machine: what it costs is unknown; estimate where it is"
            raise CasemateError(f"{key}.{name}", folder, remedy)
        found.append(_of_spec(spec))
    return found


def _of_spec(spec: Mapping[str, Any]) -> CostedNetwork:
    values = {**ABSENT_KEYS, **spec}
    return CostedNetwork.of(
        values["architecture"],
        side=values.get("upsample") or values["image_size"],
        channels=values["channels"],
        num_classes=values["num_classes"],
        options=values.get("options") or {},
    )


def _memory(model: CostedNetwork, micro_batch: int, dtype: str) -> int:
    return device_bytes(
        params=model.costs.params,
        activation_bytes=model.costs.activation_bytes,
        micro_batch=micro_batch,
        dtype=dtype,
    )
