"""Rotations and shifts: every pose of a grid on every item."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from components.attacks.interface import Items
from components.attacks.settings import SpatialSettings
from components.evaluate.metrics import MetricRow, rows_of
from components.evaluate.spatial import failure_map, grid_name, measurements, search_grid
from pipelines.stages.evaluate.evaluation import Evaluation, blocks, units_of
from pipelines.stages.evaluate.results import (
    SuiteResult,
    in_order,
    rows_by_model,
    verdict_comparisons,
    with_models,
)
from pipelines.stages.evaluate.worker import EvaluateWorker, PlacesTask

ITEMS_PER_UNIT = 10  # each with up to thousands of poses
FAILURES_NAME = "failure_map.parquet"


@dataclass(frozen=True, slots=True)
class SpatialTask(PlacesTask):
    """One model on these test items in the poses of a grid."""

    model: str
    places: tuple[int, ...]
    grid: SpatialSettings
    chunk_size: int
    early_exit: bool

    def run(self, worker: EvaluateWorker) -> pa.Table:
        part = worker.items(self.places)
        x, y = worker.pixels(part.images), part.labels.to(worker.device)
        items = Items(x, y, part.item_ids, worker.config.seed)
        with worker.ready(self.model) as model:
            found = search_grid(
                model, items, self.grid, chunk_size=self.chunk_size, early_exit=self.early_exit
            )
        return with_models([(self.model, found)])


def evaluate(evaluation: Evaluation) -> SuiteResult:
    """All models on the first items."""
    settings = evaluation.section.spatial
    assert settings is not None
    items = evaluation.items.first(settings.max_items)
    grid = settings.grid_at(min(evaluation.dataset.height, evaluation.dataset.width))
    units = []
    for model in evaluation.models:
        tasks = [
            (
                f"{model}, {len(block)} items",
                SpatialTask(model, block, grid, settings.chunk_size, settings.early_exit),
            )
            for block in blocks(items.places, ITEMS_PER_UNIT)
        ]
        units += units_of(f"spatial-{model}", tasks)
    table = in_order(evaluation.run(units), "model", "item_id")
    own = rows_by_model(table, evaluation.models)
    survived = {model: np.asarray(rows["survived"], dtype=bool) for model, rows in own.items()}
    rows: list[MetricRow] = []
    for model, found in own.items():
        numbers = measurements(found, grid)
        numbers += verdict_comparisons(survived, model, item=grid_name(grid))
        rows += rows_of(evaluation.subject(model), evaluation.suite, numbers)
    maps = (
        {}
        if settings.early_exit
        else {FAILURES_NAME: with_models((m, failure_map(r, grid)) for m, r in own.items())}
    )
    return SuiteResult(
        rows=rows,
        predictions=table,
        tables=maps,
        headlines=[("all rotations and shifts", grid_name(grid), "accuracy")],
        num_items=len(items),
    )
