"""Conflict stimuli: is an image decided by its shape or by its texture?"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from components.core.errors import CasemateError
from components.data.fitting import Fitting
from components.data.places import Place, place_of
from components.data.sources.files import decode_image_file
from components.data.sources.names import imagenet_synsets
from components.evaluate.metrics import ALL, MetricRow, rows_of
from components.evaluate.settings import Pooling
from components.evaluate.shape_bias import (
    CLASSES,
    Stimulus,
    decide,
    list_stimuli,
    measurements,
    parse_name,
)
from pipelines.stages.evaluate.evaluation import Evaluation, blocks, units_of
from pipelines.stages.evaluate.results import (
    SuiteResult,
    in_order,
    rows_by_model,
    verdict_comparisons,
    with_models,
)
from pipelines.stages.evaluate.steps import shape_bias_files
from pipelines.stages.evaluate.worker import EvaluateWorker


@dataclass(frozen=True, slots=True)
class ShapeTask:
    """The decisions of all models on these stimuli."""

    root: Place
    pooling: Pooling
    stimuli: tuple[Stimulus, ...]

    @property
    def num_items(self) -> int:
        return len(self.stimuli)

    def run(self, worker: EvaluateWorker) -> pa.Table:
        fitting = Fitting(worker.dataset.height, "squash", worker.dataset.channels)
        item_ids = [one.locator for one in self.stimuli]
        images = [
            fitting.apply(decode_image_file(self.root / name), item_id=name) for name in item_ids
        ]
        x = worker.pixels(torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2))
        return with_models(
            (model, self._rows(decide(worker.logits(model, x, item_ids), pooling=self.pooling)))
            for model in worker.models
        )

    def _rows(self, decisions: NDArray[np.int64]) -> pa.Table:
        return pa.table(
            {
                "item_id": [one.locator for one in self.stimuli],
                "shape": [CLASSES[one.shape] for one in self.stimuli],
                "texture": [CLASSES[one.texture] for one in self.stimuli],
                "decision": [CLASSES[place] for place in decisions.tolist()],
            }
        )


def evaluate(evaluation: Evaluation) -> SuiteResult:
    """All models on all stimuli."""
    settings = evaluation.section.shape_bias
    assert settings is not None
    if tuple(evaluation.dataset.classes) != imagenet_synsets():
        remedy = "needs models whose classes are the 1000 of ImageNet, in the order of their wnids"
        raise CasemateError("evaluate.shape_bias", evaluation.origin.name, remedy)
    root = place_of(settings.path)
    tasks = [
        (f"{len(block)} stimuli", ShapeTask(root, settings.pooling, block))
        for block in blocks(list_stimuli(root))
    ]
    table = in_order(evaluation.run(units_of("stimuli", tasks)), "model", "item_id")
    own = rows_by_model(table, evaluation.models)
    right = {m: np.asarray(r["decision"]) == np.asarray(r["shape"]) for m, r in own.items()}
    digest, rows = shape_bias_files(settings), list[MetricRow]()
    for model, found in own.items():
        stimuli = [parse_name(name) for name in found["item_id"].to_pylist()]
        decisions = np.array([CLASSES.index(name) for name in found["decision"].to_pylist()])
        numbers = measurements(stimuli, decisions)
        numbers += verdict_comparisons(right, model, item=ALL)
        subject = evaluation.subject(
            model, dataset="conflict_stimuli", dataset_digest=digest, resize="squash"
        )
        rows += rows_of(subject, evaluation.suite, numbers)
    return SuiteResult(
        rows=rows,
        predictions=table,
        headlines=[("shape accuracy", ALL, "shape_acc"), ("shape bias", ALL, "shape_bias")],
        num_items=len(next(iter(own.values()))),
        flags=[flag for row in rows for flag in row.flags if not flag.startswith("null")],
    )
