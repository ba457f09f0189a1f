"""Similarity of the outputs of all pairs of blocks: Pearson correlation or linear CKA."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from components.analyze import cka
from components.analyze.blocks import Blocks, find_blocks
from components.analyze.correlation import (
    chosen_streams,
    matrix_measurements,
    pearson_states,
    read_state,
)
from components.analyze.settings import BlockSettings, CorrelationSettings
from components.analyze.states import merge_all, read_arrays, to_table
from components.core.errors import at_key
from components.core.types import Array, FloatArray
from components.core.units import Unit
from components.evaluate.metrics import Measurement, MetricRow, null, rows_of
from pipelines.stages.analyze.analysis import Analysis, ItemsTask
from pipelines.stages.analyze.results import StudyResult
from pipelines.stages.analyze.worker import AnalyzeWorker
from pipelines.stages.evaluate.evaluation import blocks as pieces
from pipelines.stages.evaluate.evaluation import units_of


@dataclass(frozen=True, slots=True, eq=False)
class ExactMatrix:
    """Exact CKA of all images: the state of the only unit."""

    values: FloatArray

    def merged(self, other: "ExactMatrix") -> "ExactMatrix":
        raise ValueError("exact CKA has one unit")

    def matrix(self) -> FloatArray:
        """The state itself."""
        return self.values

    def arrays(self) -> dict[str, Array]:
        """The content of the state."""
        return {"exact": self.values}


@dataclass(frozen=True, slots=True)
class CorrelationTask(ItemsTask):
    """States of these test items in one model, by stream."""

    method: str  # pearson, cka_minibatch, cka_exact
    how: CorrelationSettings
    blocks: BlockSettings

    def run(self, worker: AnalyzeWorker) -> pa.Table:
        x = worker.pixels(worker.items(self.places).images)
        blocks = worker.blocks(self.model, self.blocks)
        with worker.plain(self.model) as model:
            if self.method == "cka_exact":
                found = cka.exact_matrices(model, blocks, x, self.how)
                return to_table({name: ExactMatrix(values) for name, values in found.items()})
            if self.method == "cka_minibatch":
                return to_table(cka.cka_states(model, blocks, x, self.how))
            states = worker.merged(x, lambda rows: pearson_states(model, blocks, rows, self.how))
            return to_table(states)


def analyze(analysis: Analysis) -> StudyResult:
    """A matrix for each model and stream."""
    how: CorrelationSettings = analysis.how
    own = {m: find_blocks(analysis.network(m), analysis.section.blocks) for m in analysis.analyzed}
    methods = {model: _method(analysis, blocks, how) for model, blocks in own.items()}
    units = {model: _units(analysis, model, methods[model]) for model in own}
    tables = iter(analysis.tables([unit for group in units.values() for unit in group]))
    rows: list[MetricRow] = []
    arrays: dict[str, Array] = {}
    names: dict[str, dict[str, list[str]]] = {}
    for model, blocks in own.items():
        states = [read_arrays(next(tables)) for _ in units[model]]
        found: list[Measurement] = []
        for stream in chosen_streams(blocks, how):
            matrix = _matrix([unit[stream.name] for unit in states], methods[model])
            arrays[f"matrices/{model}.{stream.name}.npy"] = matrix
            names.setdefault(model, {})[stream.name] = [blocks.names[i] for i in stream.positions]
            found += matrix_measurements(
                matrix,
                stream=stream.name,
                metric=_metric(methods[model], how),
                num_items=len(analysis.items),
            )
            found.append(_neighbours(matrix, stream.name, num_items=len(analysis.items)))
        rows += rows_of(analysis.subject(model), analysis.study, found)
    measures = {model: _metric(method, how) for model, method in methods.items()}
    return StudyResult(
        rows=rows,
        num_items=len(analysis.items),
        arrays=arrays,
        details={"blocks": names, "measures": measures},
        untracked=tuple(sorted(set(measures.values()))),  # of every pair: file only
    )


def _method(analysis: Analysis, blocks: Blocks, how: CorrelationSettings) -> str:
    if (how.measure or blocks.measure) == "pearson":
        return "pearson"
    return f"cka_{cka.estimator_of(how, num_items=len(analysis.items))}"


def _metric(method: str, how: CorrelationSettings) -> str:
    return f"pearson_{how.mode}" if method == "pearson" else method


def _units(analysis: Analysis, model: str, method: str) -> list[Unit]:
    items, how = analysis.items, analysis.how
    if method == "pearson":
        groups = list(pieces(items.places))
    else:
        place = dict(zip(items.item_ids, items.places, strict=True))
        with at_key("analyze.correlation.subset.num_items"):
            batches = cka.even_batches(items.item_ids, how)
        groups = [tuple(place[item_id] for item_id in batch) for batch in batches]
    tasks = [
        (
            f"{model}, {len(group)} items",
            CorrelationTask(model, group, method, how, analysis.section.blocks),
        )
        for group in groups
    ]
    return units_of(f"correlation-{model}", tasks)


def _matrix(states: Sequence[Mapping[str, Array]], method: str) -> FloatArray:
    """One matrix from the states of all units, in their order."""
    read: Any = {
        "pearson": read_state,
        "cka_minibatch": cka.MinibatchCka.of_arrays,
        "cka_exact": lambda arrays: ExactMatrix(arrays["exact"]),
    }[method]
    found: FloatArray = merge_all(read(arrays) for arrays in states).matrix()
    return found


def _neighbours(matrix: FloatArray, stream: str, *, num_items: int) -> Measurement:
    """Mean similarity of a block and the next one."""
    near = np.diagonal(matrix, offset=1)
    known = near[np.isfinite(near)]
    item, metric = f"{stream}/neighbours", "mean_similarity"
    if not len(known):
        return null(item=item, metric=metric, why="fewer than two blocks that vary")
    return Measurement(item=item, metric=metric, value=float(known.mean()), n=num_items)
