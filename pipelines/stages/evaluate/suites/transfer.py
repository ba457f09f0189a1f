"""Adversarial transfer: the perturbations of each model, evaluated on all models."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from components.core.tables import schema_of
from components.data.fitting import Fitting
from components.evaluate.metrics import NULL, Measurement, MetricRow, rows_of
from components.evaluate.settings import TransferSuiteSettings
from components.evaluate.transfer import (
    CLEAN,
    Shape,
    TransferModel,
    measurements,
    transfer_predictions,
)
from pipelines.stages.evaluate.evaluation import Evaluation, blocks, units_of
from pipelines.stages.evaluate.results import (
    MODEL,
    SuiteResult,
    in_order,
    verdict_comparisons,
)
from pipelines.stages.evaluate.worker import EvaluateWorker, PlacesTask

ITEMS_PER_UNIT = 50  # each with the attacks of all models
MATRIX_NAME = "matrix.parquet"
MATRIX = schema_of(  # reason: of nulls
    "attack: string, eps: float64, source: string, target: string, accuracy: float64, "
    "lo95: float64, hi95: float64, clean: float64, drop: float64, transfer_rate: float64, "
    "n: int64, reason: string"
)


@dataclass(frozen=True, slots=True)
class TransferTask(PlacesTask):
    """All perturbations of these test items on all models."""

    places: tuple[int, ...]
    settings: TransferSuiteSettings

    def run(self, worker: EvaluateWorker) -> pa.Table:
        items = worker.items(self.places)
        with ExitStack() as stack:
            models = []
            for name in worker.models:
                model = stack.enter_context(worker.ready(name))
                spec = model.spec
                shape = (spec.channels, spec.image_size, spec.image_size)
                models.append(TransferModel(name, worker.fixed(model), shape))
            shapes = {model.shape for model in models}
            images = {s: worker.pixels(_fitted(items.images, s, items.item_ids)) for s in shapes}
            labels = items.labels.to(worker.device)
            return transfer_predictions(models, images, labels, items.item_ids, self.settings)


def _fitted(images: Tensor, shape: Shape, item_ids: Sequence[str]) -> Tensor:
    """uint8 images (N, C, H, W) in the shape of a model; others are resized in 8 bit."""
    if tuple(images.shape[1:]) == shape:
        return images
    fitting = Fitting(shape[1], "squash", shape[0])
    pixels = images.permute(0, 2, 3, 1).numpy()
    fitted = [
        fitting.apply(image, item_id=name) for image, name in zip(pixels, item_ids, strict=True)
    ]
    return torch.from_numpy(np.stack(fitted)).permute(0, 3, 1, 2)


def evaluate(evaluation: Evaluation) -> SuiteResult:
    """The matrix of all models, those of other runs included."""
    settings = evaluation.section.transfer
    assert settings is not None
    items = evaluation.items.first(settings.max_items)
    tasks = [
        (f"{len(block)} items", TransferTask(block, settings))
        for block in blocks(items.places, ITEMS_PER_UNIT)
    ]
    table = in_order(
        evaluation.run(units_of("transfer", tasks)), "target", "attack", "source", "item_id"
    )
    shapes = {name: model.shape for name, model in evaluation.models.items()}
    found = measurements(table, shapes, settings)
    clean = _clean_verdicts(table, list(evaluation.models))
    rows: list[MetricRow] = []
    for target, numbers in found.items():
        compared = verdict_comparisons(clean, target, item=CLEAN)
        rows += rows_of(evaluation.subject(target), evaluation.suite, [*numbers, *compared])
    budget = f"{settings.eps * 255:g}/255"
    return SuiteResult(
        rows=rows,
        predictions=table,
        tables={MATRIX_NAME: _matrix(found, settings)},
        headlines=[  # each model on its own perturbations; the matrix has the others
            (f"{attack} {budget}", f"{attack}/{MODEL}", "accuracy") for attack in settings.attacks
        ],
        num_items=len(items),
    )


def _clean_verdicts(table: pa.Table, models: Sequence[str]) -> dict[str, np.ndarray]:
    rows = [row for row in table.to_pylist() if row["attack"] == CLEAN]
    return {
        model: np.array([r["prediction"] == r["label"] for r in rows if r["target"] == model])
        for model in models
    }


def _matrix(
    found: Mapping[str, Sequence[Measurement]], settings: TransferSuiteSettings
) -> pa.Table:
    """One row per attack, source and target."""
    rows = []
    for target, numbers in found.items():
        by_place = {(one.item, one.metric): one for one in numbers}
        for attack in settings.attacks:
            for source in found:
                item = f"{attack}/{source}"
                cell = by_place[item, "accuracy"]
                reasons = [f.removeprefix(NULL) for f in cell.flags if f.startswith(NULL)]
                rows.append(
                    {
                        "attack": attack,
                        "eps": settings.eps,
                        "source": source,
                        "target": target,
                        "accuracy": cell.value,
                        "lo95": cell.lo95,
                        "hi95": cell.hi95,
                        "clean": by_place[CLEAN, "accuracy"].value,
                        "drop": by_place[item, "drop"].value,
                        "transfer_rate": by_place[item, "transfer_rate"].value,
                        "n": cell.n,
                        "reason": reasons[0] if reasons else None,
                    }
                )
    return pa.Table.from_pylist(rows, schema=MATRIX)
