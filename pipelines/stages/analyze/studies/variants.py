"""Predictions of many variants of a network: what lesions and restricted attention share."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import pyarrow as pa
import torch

from components.analyze.prefixes import variant_table
from components.core.types import Images, IntArray
from components.core.units import Unit
from pipelines.stages.analyze.analysis import Analysis
from pipelines.stages.analyze.worker import AnalyzeWorker
from pipelines.stages.evaluate.evaluation import blocks as pieces
from pipelines.stages.evaluate.evaluation import units_of
from pipelines.stages.evaluate.results import in_order, with_models

PREDICTIONS_NAME = "predictions.parquet"
VARIANTS_NAME = "variants.parquet"
VARIANTS = pa.schema([("model", pa.string()), ("place", pa.int32()), ("name", pa.string())])


class PredictFn(Protocol):
    """(V, B) predictions of all variants on one batch."""

    def __call__(self, rows: Images) -> IntArray: ...


def predicted(worker: AnalyzeWorker, places: Sequence[int], predict: PredictFn) -> pa.Table:
    """One row per item; passes have at most `micro_batch` rows."""
    items = worker.items(places)
    batches = torch.split(worker.pixels(items.images), worker.config.micro_batch)
    found = np.concatenate([predict(rows) for rows in batches], axis=1)
    return variant_table(items.item_ids, items.labels, found)


def results_by_model(
    analysis: Analysis, task: type, settings: Mapping[str, object]
) -> dict[str, pa.Table]:
    """The rows of every model, sorted by item; units have the items of one pass."""
    groups = list(pieces(analysis.items.places, analysis.section.micro_batch))
    units: dict[str, list[Unit]] = {}
    for model in analysis.analyzed:
        tasks = [
            (f"{model}, {len(group)} items", task(model=model, places=group, **settings))
            for group in groups
        ]
        units[model] = units_of(f"{analysis.study}-{model}", tasks)
    tables = iter(analysis.tables([unit for group in units.values() for unit in group]))
    return {
        model: in_order(pa.concat_tables(next(tables) for _ in own), "item_id")
        for model, own in units.items()
    }


def variant_tables(
    results: Mapping[str, pa.Table], names: Mapping[str, Sequence[str]]
) -> dict[str, pa.Table]:
    """The files of predictions and of the names of their variants."""
    rows = [
        {"model": model, "place": place, "name": name}
        for model, own in names.items()
        for place, name in enumerate(own)
    ]
    return {
        PREDICTIONS_NAME: with_models(results.items()),
        VARIANTS_NAME: pa.Table.from_pylist(rows, schema=VARIANTS),
    }
