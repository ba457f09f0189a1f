"""Histograms of pre-softmax gaps: clean and attacked images, before and after attention scaling."""

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from components.analyze.gaps import (
    ATTACKED,
    CLEAN,
    GapState,
    attacked_images,
    gap_states,
    measurements,
    searched_scales,
)
from components.analyze.settings import GapSettings
from components.analyze.states import State, merge_all, read_arrays, to_table
from components.attacks.scales import Scales
from components.core.units import Unit
from components.evaluate.metrics import MetricRow, rows_of
from pipelines.stages.analyze.analysis import Analysis, ItemsTask
from pipelines.stages.analyze.results import StudyResult
from pipelines.stages.analyze.worker import AnalyzeWorker
from pipelines.stages.evaluate.evaluation import blocks as pieces
from pipelines.stages.evaluate.evaluation import units_of
from pipelines.stages.evaluate.results import with_models

STATES_NAME = "states.parquet"
FACTORS = pa.schema([("factor", pa.float64())])


@dataclass(frozen=True, slots=True)
class ScalesTask(ItemsTask):
    """Factors of the scaled network, searched on these test items."""

    how: GapSettings

    def run(self, worker: AnalyzeWorker) -> pa.Table:
        reference = worker.under_attack(self.places)
        with worker.plain(self.model) as model:
            found = searched_scales(model, model.net, reference, self.how)
        assert found is not None
        return pa.table({"factor": [float(factor) for factor in found]}, schema=FACTORS)


@dataclass(frozen=True, slots=True)
class GapTask(ItemsTask):
    """Histograms of one model on these test items."""

    scales: Scales | None
    how: GapSettings

    def run(self, worker: AnalyzeWorker) -> pa.Table:
        items = worker.under_attack(self.places)
        with worker.ready(self.model) as model:
            attacked = attacked_images(worker.fixed(model), items, self.how)
        found: dict[str, State] = {}
        with worker.plain(self.model) as model:
            for kind, x in ((CLEAN, items.x), (ATTACKED, attacked)):
                found |= worker.merged(
                    x,
                    lambda rows, kind=kind: gap_states(  # type: ignore[misc]
                        model, model.net, {kind: rows}, self.how, scales=self.scales
                    ),
                )
        return to_table(found)


def analyze(analysis: Analysis) -> StudyResult:
    """The histograms of all models."""
    how: GapSettings = analysis.how
    scales = _scales(analysis, how)
    units: dict[str, list[Unit]] = {}
    for model in analysis.analyzed:
        tasks = [
            (f"{model}, {len(group)} items", GapTask(model, group, scales.get(model), how))
            for group in pieces(analysis.items.places, analysis.section.micro_batch)
        ]
        units[model] = units_of(f"gaps-{model}", tasks)
    tables = iter(analysis.tables([unit for group in units.values() for unit in group]))
    rows: list[MetricRow] = []
    merged: dict[str, pa.Table] = {}
    for model, own in units.items():
        parts = [read_arrays(next(tables)) for _ in own]
        states = {
            name: merge_all(GapState.of_arrays(part[name], how) for part in parts)
            for name in parts[0]
        }
        merged[model] = to_table(states)
        rows += rows_of(analysis.subject(model), analysis.study, measurements(states))
    return StudyResult(
        rows=rows,
        num_items=len(analysis.items),
        tables={STATES_NAME: with_models(merged.items())},
        details={"scales": {model: list(factors) for model, factors in scales.items()}},
    )


def _scales(analysis: Analysis, how: GapSettings) -> Mapping[str, Scales]:
    """The factors of every model, fixed before any histogram; empty without a search."""
    if how.search is None:
        return {}
    places = analysis.items.first(how.search.num_items).places
    units = [
        Unit(
            f"scales-{model}",
            f"{model}, attention scales",
            ScalesTask(model, places, how),
            len(places),
        )
        for model in analysis.analyzed
    ]
    tables = analysis.tables(units)
    return {
        model: tuple(table["factor"].to_pylist())
        for model, table in zip(analysis.analyzed, tables, strict=True)
    }
