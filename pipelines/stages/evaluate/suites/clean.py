"""Clean test items: accuracy, calibration, the accuracy of each class."""

from dataclasses import dataclass

import pyarrow as pa

from components.evaluate import calibration
from components.evaluate.metrics import ALL, MetricRow, rows_of
from components.evaluate.predictions import (
    Predictions,
    accuracy_measurements,
    class_accuracy,
    joined,
)
from pipelines.stages.evaluate.evaluation import Evaluation, blocks, units_of
from pipelines.stages.evaluate.results import SuiteResult, comparisons, rows_by_model, with_models
from pipelines.stages.evaluate.worker import EvaluateWorker, PlacesTask


@dataclass(frozen=True, slots=True)
class CleanTask(PlacesTask):
    """Predictions of all models on these test items."""

    places: tuple[int, ...]

    def run(self, worker: EvaluateWorker) -> pa.Table:
        items = worker.items(self.places)
        x, labels = worker.pixels(items.images), items.labels.to(worker.device)
        return with_models(
            (
                model,
                Predictions.of_logits(
                    items.item_ids, labels, worker.logits(model, x, items.item_ids)
                ).table(),
            )
            for model in worker.models
        )


def evaluate(evaluation: Evaluation) -> SuiteResult:
    """All models on the chosen items."""
    tasks = [(f"{len(block)} items", CleanTask(block)) for block in blocks(evaluation.items.places)]
    table = evaluation.run(units_of("clean", tasks))
    found = clean_predictions(table, list(evaluation.models))
    num_bins, classes = evaluation.section.calibration.num_bins, evaluation.dataset.classes
    rows: list[MetricRow] = []
    for model, own in found.items():
        numbers = [
            *accuracy_measurements(own, item=ALL),
            *calibration.measurements(own, item=ALL, num_bins=num_bins),
            *class_accuracy(own, classes),
            *comparisons(found, model, item=ALL),
        ]
        rows += rows_of(evaluation.subject(model), evaluation.suite, numbers)
    return SuiteResult(
        rows=rows,
        predictions=with_models((model, own.table()) for model, own in found.items()),
        headlines=[("clean", ALL, "accuracy")],
        num_items=len(evaluation.items),
    )


def clean_predictions(table: pa.Table, models: list[str]) -> dict[str, Predictions]:
    """The predictions of each model, sorted by item id."""
    own = rows_by_model(table, models)
    return {model: joined([Predictions.of_table(rows)]) for model, rows in own.items()}
