"""Cost estimates of the suites of a recipe: forward passes, FLOPs, hours; no weights are read.

Passes count once per image and model. A step of an attack is a pass with a gradient, three times
the FLOPs of one without. Corruptions also cost CPU time, once for all models.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from components.attacks.spatial import grid_poses
from components.certify.estimate import (
    ACCELERATORS,
    Rate,
    Work,
    device_bytes,
    estimate,
    fits,
    measured_rate,
    nominal_rate,
)
from components.core.errors import CasemateError
from components.data.sources import find_source
from components.evaluate.settings import PREPARED, SubsetSettings, TransferSuiteSettings
from components.evaluate.shape_bias import PUBLISHED_COUNTS
from components.models.costs import Costs, costs_of_shapes, network_of_shapes
from components.models.spec import ABSENT_KEYS
from pipelines.recipe.facts import (
    given_spec,
    known_channels,
    known_side,
    source_info,
    spec_of,
)
from pipelines.recipe.schema.evaluate import CLEAN, EvaluateSection
from pipelines.recipe.schema.recipe import Recipe

NUM_CLASSES = 1000  # while the files are not read; the head is a small share of all FLOPs
MACS = 2  # FLOPs of a multiply-accumulate
GRADIENT = 3  # cost of a pass with its gradient, in passes
NUM_VARIANTS = 95
CORRUPTION_SECONDS = 0.12  # CPU time of all 95 variants of an image of 224 pixels: make bench
SIDE = 224
Row = dict[str, Any]  # of the estimate, as JSON has it


@dataclass(frozen=True, slots=True)
class SuiteWork:
    """Passes per model, on average, and how many there are at least."""

    num_items: int
    passes: int  # without gradient
    gradients: int = 0  # passes with a gradient
    least_share: float = 1.0  # of the passes, if items stop early
    cpu_seconds: float = 0.0  # for all models together


@dataclass(frozen=True, slots=True)
class CostedModel:
    """Costs of one image in a network, and its width."""

    costs: Costs
    width: int
    net: nn.Module  # without weights


def estimates_of(
    recipe: Recipe,
    *,
    accelerators: Sequence[str],
    dtype: str,
    num_workers: int,
    num_items: int | None,
    passes_per_second: float | None,
) -> list[Row]:
    """One row per suite: items, passes, FLOPs, CPU seconds, hours at each place, memory."""
    section = recipe.evaluate
    if section is None:
        return []
    own = [model_cost(recipe, name) for name in recipe.evaluated_models()]
    rows = []
    for suite, work in _works(recipe, section, given=num_items):
        models = own + (_other_models(section.transfer) if suite == "transfer" else [])
        rows.append(
            estimate_row(
                f"evaluate.{suite}",
                work,
                models,
                micro_batch=section.micro_batch,
                accelerators=accelerators,
                dtype=dtype,
                num_workers=num_workers,
                passes_per_second=passes_per_second,
            )
        )
    return rows


def estimate_row(
    step: str,
    work: SuiteWork,
    models: Sequence[CostedModel],
    *,
    micro_batch: int,
    accelerators: Sequence[str],
    dtype: str,
    num_workers: int,
    passes_per_second: float | None,
) -> Row:
    """The row of one step: `work` of each of these models."""
    flops = sum(
        MACS * model.costs.flops * (work.passes + GRADIENT * work.gradients) for model in models
    )
    passes = work.passes * len(models)
    rates = _rates(models, accelerators, dtype=dtype, passes_per_second=passes_per_second)
    memory = max(_memory(model, micro_batch, dtype) for model in models)
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
    further = work.cpu_seconds / num_workers / 3600
    return {
        "where": where,
        "low": found.hours_low + further,
        "high": found.hours_high + further,
        "rate": rate.source,
        "fits": where not in ACCELERATORS or fits(memory, where),
    }


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
    """Items of a subset, as far as it is known without the data."""
    chosen = len(subset.item_ids) if subset.item_ids else subset.num_items
    published = (source_info(recipe.data).splits or {}).get("test")
    known = [n for n in (chosen, given, recipe.data.limits.get("test"), published) if n]
    if not known:
        raise CasemateError(f"{key}.subset.num_items", None, "is open; give --items N")
    return min(known)


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


def model_cost(recipe: Recipe, name: str) -> CostedModel:
    """A model of the recipe: from its section, or from the folder of a given one."""
    if recipe.given_model():
        spec = given_spec(recipe)
        if spec is None:
            remedy = "is not on this machine: what it costs is unknown; estimate where it is"
            raise CasemateError("model.pretrained", recipe.model.pretrained, remedy)
        return _of_spec(spec)
    section, side = recipe.model_of(name), known_side(recipe.data)
    if side is None:
        raise CasemateError("data.image_size", None, "is open; add --set data.image_size=224")
    return _costed(
        section.architecture,
        side=section.upsample or side,
        channels=known_channels(recipe.data) or 3,
        num_classes=source_info(recipe.data).num_classes or NUM_CLASSES,
        options=section.options,
    )


def _other_models(how: TransferSuiteSettings | None) -> list[CostedModel]:
    return folder_costs("evaluate.transfer.models", how.models if how else {})


def folder_costs(key: str, folders: Mapping[str, str]) -> list[CostedModel]:
    """The models of these folders; `key` is the one that names them in a recipe."""
    found = []
    for name, folder in folders.items():
        spec = spec_of(Path(folder).expanduser())
        if spec is None:
            remedy = "is not on this machine: what it costs is unknown; estimate where it is"
            raise CasemateError(f"{key}.{name}", folder, remedy)
        found.append(_of_spec(spec))
    return found


def _of_spec(spec: Mapping[str, Any]) -> CostedModel:
    values = {**ABSENT_KEYS, **spec}
    return _costed(
        values["architecture"],
        side=values.get("upsample") or values["image_size"],
        channels=values["channels"],
        num_classes=values["num_classes"],
        options=values.get("options") or {},
    )


def _costed(
    architecture: str, *, side: int, channels: int, num_classes: int, options: Mapping[str, Any]
) -> CostedModel:
    try:
        net = network_of_shapes(
            architecture,
            image_size=side,
            channels=channels,
            num_classes=num_classes,
            options=options,
        )
    except RuntimeError as error:  # raised by user code on the meta device
        remedy = f"needs values to be built, costs are counted from shapes alone: {error}"
        raise CasemateError("model.architecture", architecture, remedy) from error
    costs = costs_of_shapes(net, image_size=side, channels=channels)
    return CostedModel(costs, int(getattr(net, "num_features", 0)), net)


def _memory(model: CostedModel, micro_batch: int, dtype: str) -> int:
    return device_bytes(
        params=model.costs.params,
        activation_bytes=model.costs.activation_bytes,
        micro_batch=micro_batch,
        dtype=dtype,
    )


def _rates(
    models: Sequence[CostedModel],
    accelerators: Sequence[str],
    *,
    dtype: str,
    passes_per_second: float | None,
) -> dict[str, Rate]:
    """Speed at each place: as measured, or a share of each accelerator's peak."""
    if passes_per_second is not None:
        if not passes_per_second > 0:
            remedy = "is not a speed; write a number above 0"
            raise CasemateError("--passes-per-second", passes_per_second, remedy)
        mean = MACS * sum(model.costs.flops for model in models) / len(models)
        rate = measured_rate(
            flops_per_pass=mean, passes_per_second=passes_per_second, where="as given"
        )
        return {"measured": rate}
    width = min(model.width for model in models)
    names = accelerators or [n for n, a in ACCELERATORS.items() if dtype in a.peak_tflops]
    return {
        name: nominal_rate(name, dtype=dtype, width=width)
        for name in names or list(ACCELERATORS)[:1]
    }
