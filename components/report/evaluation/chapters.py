"""Chapters of the evaluation suites; suites that were not run have none."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from components.core.errors import at_key
from components.core.folders import Folder
from components.core.tables import read_table
from components.evaluate.metrics import METRICS_NAME, MetricRow, read_metrics
from components.report.content import Cell, Chapter, Column
from components.report.evaluation import (
    clean,
    corruptions,
    overview,
    shape_bias,
    shifts,
    spatial,
    transfer,
)
from components.report.evaluation.assembly import SuiteChapter
from components.report.evaluation.rows import SuiteRows, suite_rows
from components.report.results import RUN_AGAIN

FAILURE_MAP = "failure_map.parquet"
SUITES = ("clean", "corruptions", "shifts", "shape_bias", "transfer", "spatial")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The numbers of all suites, and the failure maps of the spatial attack by model."""

    rows: tuple[MetricRow, ...] = ()
    failures: Mapping[str, pa.Table] = field(default_factory=dict)

    def suites(self) -> dict[str, list[SuiteRows]]:
        """The suites that have rows."""
        found = {name: suite_rows(self.rows, name) for name in SUITES}
        return {name: parts for name, parts in found.items() if parts}

    def single(self) -> dict[str, SuiteRows]:
        """The suites with one setting, which an overview may put side by side."""
        return {name: parts[0] for name, parts in self.suites().items() if len(parts) == 1}

    def headline_columns(self) -> dict[Column, dict[str, Cell]]:
        """Columns of the headline: accuracy of each model, by suite."""
        return overview.headline_columns(self.single())


def chapters(found: Evaluation) -> tuple[Chapter, ...]:
    """The overview, then one chapter per suite."""
    first = overview.chapter(found.single())
    makers = _suite_chapters(found.failures)
    shown = [makers[name].of(parts) for name, parts in found.suites().items()]
    return (first, *shown) if first else tuple(shown)


def _suite_chapters(failures: Mapping[str, pa.Table]) -> dict[str, SuiteChapter]:
    of_spatial = partial(spatial.charts, failures=failures)
    return {
        "clean": SuiteChapter(
            "clean", "Clean accuracy and calibration", clean.INTRO, clean.charts, clean.tables
        ),
        "corruptions": SuiteChapter(
            "corruptions",
            "Common corruptions",
            corruptions.INTRO,
            corruptions.charts,
            corruptions.tables,
        ),
        "shifts": SuiteChapter("shifts", "Distribution shifts", shifts.INTRO, shifts.charts),
        "shape_bias": SuiteChapter(
            "shape", "Shape against texture", shape_bias.INTRO, shape_bias.charts
        ),
        "transfer": SuiteChapter(
            "transfer", "Adversarial transfer", transfer.INTRO, transfer.charts, transfer.tables
        ),
        "spatial": SuiteChapter("spatial", "Rotations and shifts", spatial.INTRO, of_spatial),
    }


def read_evaluation(folders: Mapping[str, Folder]) -> Evaluation:
    """The results of all steps `evaluate.<suite>`; empty without one."""
    rows: list[MetricRow] = []
    failures: dict[str, pa.Table] = {}
    for step, folder in folders.items():
        if step.split(".")[0] != "evaluate":
            continue
        with at_key(step, then=RUN_AGAIN):
            rows += read_metrics(folder / METRICS_NAME)
            if (path := folder / FAILURE_MAP).exists():
                failures |= _by_model(read_table(path))
    return Evaluation(tuple(rows), failures)


def _by_model(table: pa.Table) -> dict[str, pa.Table]:
    models = table.column("model").unique().to_pylist()
    return {model: table.filter(pc.equal(table["model"], model)) for model in models}
