"""Files and metrics of a suite; `__init__.py` of this folder describes them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from components.core.settings import plain
from components.core.tables import write_table
from components.evaluate.metrics import (
    METRICS_NAME,
    Measurement,
    MetricRow,
    mlflow_name,
    write_metrics,
)
from components.evaluate.predictions import (
    Predictions,
    comparison_measurements,
    verdict_comparison,
)
from pipelines.runtime.artifacts import StageDir
from pipelines.stages.evaluate.evaluation import PREDICTIONS_NAME, Evaluation
from pipelines.stages.registry import Headline, headline

SUMMARY_NAME = "summary.json"
UNTRACKED = ("class_accuracy", "bin_accuracy", "bin_confidence")  # up to thousands: file only
MODEL = "{model}"  # in items of headlines: the name of the model


@dataclass(frozen=True, kw_only=True)
class SuiteResult:
    """What a suite found."""

    rows: Sequence[MetricRow]
    predictions: pa.Table
    headlines: Sequence[tuple[str, str, str]]  # what, item (with MODEL) and metric, of every model
    num_items: int
    flags: Sequence[str] = ()
    tables: Mapping[str, pa.Table] = field(default_factory=dict)  # further ones, by file name


def write(evaluation: Evaluation, result: SuiteResult, out: StageDir) -> None:
    """The files of a step, its metrics and its tags."""
    tables = {PREDICTIONS_NAME: result.predictions, **result.tables}
    for name, table in tables.items():
        write_table(out.path / name, table)
    write_metrics(out.path / METRICS_NAME, result.rows)
    out.write_json(SUMMARY_NAME, _summary(evaluation, result))
    out.run.tags({"casemate.device": ", ".join(sorted(evaluation.devices))})
    track(out, result.rows, prefix=f"evaluate/{evaluation.suite}/", untracked=UNTRACKED)
    out.run.artifacts(*(out.path / name for name in (METRICS_NAME, SUMMARY_NAME, *tables)))


def comparisons(
    found: Mapping[str, Predictions], model: str, *, item: str, level: float | None = None
) -> list[Measurement]:
    """One model against each of the others on the same items."""
    return [
        measurement
        for other in found
        if other != model
        for measurement in comparison_measurements(
            found[model], found[other], rival=other, item=item, level=level
        )
    ]


def verdict_comparisons(
    found: Mapping[str, NDArray[np.bool_]], model: str, *, item: str
) -> list[Measurement]:
    """The same from (N,) verdicts about the same items in the same order."""
    return [
        measurement
        for other in found
        if other != model and len(found[model])
        for measurement in verdict_comparison(found[model], found[other], rival=other, item=item)
    ]


def with_models(tables: Iterable[tuple[str, pa.Table]]) -> pa.Table:
    """Tables of several models as one, with the model in the first column."""
    return pa.concat_tables(constant(table, 0, "model", model) for model, table in tables)


def rows_by_model(table: pa.Table, models: Iterable[str]) -> dict[str, pa.Table]:
    """The rows of each model, without that column."""
    return {model: rows_where(table, "model", model) for model in models}


def rows_where(table: pa.Table, name: str, value: str) -> pa.Table:
    """The rows with this value, without that column."""
    return table.filter(pc.equal(table.column(name), value)).drop_columns([name])


def in_order(table: pa.Table, *keys: str) -> pa.Table:
    """Sorted rows: equal whatever the units were."""
    return table.sort_by([(key, "ascending") for key in keys]).combine_chunks()


def constant(table: pa.Table, place: int, name: str, value: str) -> pa.Table:
    """The table with a further column of one text."""
    return table.add_column(place, name, pa.array([value] * len(table), pa.string()))


def _summary(evaluation: Evaluation, result: SuiteResult) -> dict[str, Any]:
    section, suite = evaluation.section, evaluation.suite
    settings = getattr(section, suite, section.calibration)
    models: dict[str, Any] = {}
    for row in result.rows:
        own = models.setdefault(row.model, {"digest": row.model_digest, "metrics": {}})
        if row.metric not in UNTRACKED:
            own["metrics"][_short(row)] = row.value
    return {
        "suite": suite,
        "settings": plain(settings),
        "subset": plain(section.subset),
        "seed": evaluation.seed,
        "num_items": result.num_items,
        "flags": sorted(set(result.flags)),
        "models": models,
        "headlines": headlines_of(result.rows, result.headlines),
        "devices": sorted(evaluation.devices),
    }


def headlines_of(
    rows: Sequence[MetricRow], shown: Sequence[tuple[str, str, str]]
) -> list[Headline]:
    """Rows of the flow's summary, model after model; numbers without a value are left out.

    `shown`: what, item and metric of rows.
    """
    found: list[Headline] = []
    for model in dict.fromkeys(row.model for row in rows):
        for what, item, metric in shown:
            for row in rows:
                if (row.model, row.item, row.metric) == (model, item.replace(MODEL, model), metric):
                    found += _headline(what, row)
    return found


def _headline(what: str, row: MetricRow) -> list[Headline]:
    if row.value is None or row.lo95 is None or row.hi95 is None or row.n is None:
        return []
    share = {"value": row.value, "low": row.lo95, "high": row.hi95, "num_items": row.n}
    return [headline(what, row.model, share)]


def _short(row: MetricRow) -> str:
    return mlflow_name(row).removeprefix(f"evaluate/{row.suite}/")


def track(
    out: StageDir, rows: Sequence[MetricRow], *, prefix: str, untracked: Sequence[str]
) -> None:
    """All numbers of a model; in the step's run with its name, if there are several models."""
    stage = prefix.split("/")[0]
    several = len({row.model for row in rows}) > 1
    for model in dict.fromkeys(row.model for row in rows):
        own = {
            mlflow_name(row, stage=stage): row.value
            for row in rows
            if row.model == model and row.value is not None and row.metric not in untracked
        }
        named = {prefix + f"{model}/" + name.removeprefix(prefix): v for name, v in own.items()}
        trained_in = out.trained_in(model)
        out.run.metrics(named if several else own, trained_in=trained_in)
        out.run.model_results(trained_in, metrics=own, tags={})
