"""Perturbations as pictures: alignment with the patch grid, and what judges see in them."""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from components.analyze import semantics
from components.analyze.pictures import (
    EdgeState,
    alignment_measurements,
    perturbed_images,
    to_picture,
)
from components.analyze.semantics import Judge, judged
from components.analyze.settings import PerturbationSettings
from components.analyze.states import SCHEMA as STATE_SCHEMA
from components.analyze.states import State, merge_all, read_arrays, to_table
from components.core.types import Array
from components.core.units import Unit
from components.evaluate.metrics import Measurement, MetricRow, null, rows_of
from pipelines.stages.analyze.analysis import Analysis, ItemsTask
from pipelines.stages.analyze.results import StudyResult
from pipelines.stages.analyze.worker import AnalyzeWorker
from pipelines.stages.evaluate.evaluation import blocks as pieces
from pipelines.stages.evaluate.evaluation import units_of
from pipelines.stages.evaluate.results import in_order, with_models

JUDGED_NAME = "judged.parquet"
EDGES, PICTURES = "edges", "pictures"


@dataclass(frozen=True, slots=True, eq=False)
class Shown:
    """Pictures that are kept, as uint8."""

    images: Array

    def merged(self, other: "Shown") -> "Shown":
        """All of both."""
        return Shown(np.concatenate([self.images, other.images]))

    def arrays(self) -> dict[str, Array]:
        """The content of the state."""
        return {"images": self.images}


@dataclass(frozen=True, slots=True)
class PerturbationTask(ItemsTask):
    """Perturbations of one model on these test items; the first `num_shown` are kept."""

    judges: tuple[str, ...]
    num_shown: int
    how: PerturbationSettings

    def run(self, worker: AnalyzeWorker) -> pa.Table:
        items = worker.under_attack(self.places)
        with worker.ready(self.model) as model:
            perturbed = perturbed_images(worker.fixed(model), items, self.how)
        delta = perturbed - items.x
        pictures = to_picture(delta, eps=self.how.eps)
        states: dict[str, State] = {EDGES: EdgeState.of(delta)}
        if self.num_shown:
            states[PICTURES] = Shown(as_bytes(pictures[: self.num_shown]))
        with ExitStack() as stack:
            judges = []
            for name in self.judges:
                judge = stack.enter_context(worker.ready(name))
                side = judge.spec.image_size
                shape = (judge.spec.channels, side, side)
                judges.append(Judge(name, worker.fixed(judge), shape))
            tables = [to_table(states)]
            if judges:
                k = self.how.top_k
                tables.append(judged(judges, pictures, items.y, items.item_ids, top_k=k))
        return pa.concat_tables(tables, promote_options="default")


def as_bytes(images: Tensor) -> Array:
    """Pixels in [0, 1] as uint8, rounded."""
    found: Array = (images * 255).round().to(torch.uint8).cpu().numpy()
    return found


def analyze(analysis: Analysis) -> StudyResult:
    """Pictures, alignment and judgements of all models, on the same items."""
    how: PerturbationSettings = analysis.how
    units = {model: _units(analysis, model, how) for model in analysis.analyzed}
    tables = iter(analysis.tables([unit for group in units.values() for unit in group]))
    shown = analysis.items.first(how.num_pictures)
    split = analysis.dataset.on_demand("test")
    originals = split.rows(torch.tensor(shown.places, dtype=torch.int64)).images
    arrays: dict[str, Array] = {"pictures/originals.npy": originals.numpy()}
    rows: list[MetricRow] = []
    verdicts: dict[str, pa.Table] = {}
    for model, own in units.items():
        parts = [next(tables) for _ in own]
        states = [read_arrays(_of_states(part)) for part in parts]
        edges = merge_all(EdgeState.of_arrays(part[EDGES]) for part in states)
        kept = [Shown(part[PICTURES]["images"]) for part in states if PICTURES in part]
        arrays[f"pictures/{model}.npy"] = merge_all(kept).images
        found = _alignment(edges, analysis, model, how)
        if analysis.judges:
            judgements = pa.concat_tables(_of_judges(part) for part in parts)
            verdicts[model] = in_order(judgements, "judge", "sign", "item_id")
            found += semantics.measurements(
                verdicts[model], top_k=how.top_k, num_classes=len(analysis.dataset.classes)
            )
        rows += rows_of(analysis.subject(model), analysis.study, found)
    return StudyResult(
        rows=rows,
        num_items=len(analysis.items),
        headlines=[
            (f"perturbations, judge {judge}", f"{judge}/plus", f"top{how.top_k}_accuracy")
            for judge in analysis.judges
        ],
        tables={JUDGED_NAME: with_models(verdicts.items())} if verdicts else {},
        arrays=arrays,
        details={"labels": list(shown.labels), "item_ids": list(shown.item_ids)},
    )


def _units(analysis: Analysis, model: str, how: PerturbationSettings) -> list[Unit]:
    tasks, left = [], how.num_pictures
    for group in pieces(analysis.items.places, analysis.section.micro_batch):
        num_shown = min(left, len(group))
        left -= num_shown
        task = PerturbationTask(model, group, analysis.judges, num_shown, how)
        tasks.append((f"{model}, {len(group)} items", task))
    return units_of(f"perturbations-{model}", tasks)


def _of_states(table: pa.Table) -> pa.Table:
    return table.filter(pc.is_valid(table["state"])).select(STATE_SCHEMA.names)


def _of_judges(table: pa.Table) -> pa.Table:
    return table.filter(pc.is_null(table["state"])).select(semantics.SCHEMA.names)


def _alignment(
    edges: EdgeState, analysis: Analysis, model: str, how: PerturbationSettings
) -> list[Measurement]:
    """Of the given patch, else of the model's own; null for a model without a patch grid."""
    size = how.patch_size or _patch_pixels(analysis, model)
    if size is not None:
        return alignment_measurements(edges, patch_size=size)
    why = "the model has no patch grid of whole pixels; set patch_size"
    names = ("score", "rank", "z")
    return [null(item="patch_alignment", metric=name, why=why) for name in names]


def _patch_pixels(analysis: Analysis, model: str) -> int | None:
    """Side of a patch in pixels of the dataset; None if images have fewer than two of them."""
    network: Any = analysis.network(model)
    spec = analysis.models[model].spec
    patch = getattr(getattr(network, "patch_embed", None), "patch_size", None)
    if patch is None:
        return None
    side = patch[0] if isinstance(patch, tuple | list) else patch
    pixels, rest = divmod(int(side) * spec.image_size, spec.network_size)
    return pixels if not rest and 2 <= pixels <= spec.image_size // 2 else None
