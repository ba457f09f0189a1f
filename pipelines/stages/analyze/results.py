"""Files and metrics of a study; `__init__.py` of this folder describes them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from components.core.files import atomic
from components.core.settings import plain
from components.core.tables import write_table
from components.core.types import Array
from components.evaluate.metrics import METRICS_NAME, MetricRow, mlflow_name, write_metrics
from pipelines.runtime.artifacts import StageDir
from pipelines.stages.analyze.analysis import Analysis
from pipelines.stages.evaluate.results import SUMMARY_NAME, headlines_of, track


@dataclass(frozen=True, kw_only=True)
class StudyResult:
    """What a study found."""

    rows: Sequence[MetricRow]
    num_items: int
    headlines: Sequence[tuple[str, str, str]] = ()  # what, item and metric of rows, of every model
    tables: Mapping[str, pa.Table] = field(default_factory=dict)  # by file name
    arrays: Mapping[str, Array] = field(default_factory=dict)  # by file name
    details: Mapping[str, Any] = field(default_factory=dict)  # of the summary
    untracked: Sequence[str] = ()  # metrics that are in files only


def write(analysis: Analysis, result: StudyResult, out: StageDir) -> None:
    """The files of a step, its metrics and its tags."""
    for name, table in result.tables.items():
        write_table(out.path / name, table)
    for name, array in result.arrays.items():
        _write_array(out.path / name, array)
    write_metrics(out.path / METRICS_NAME, result.rows)
    out.write_json(SUMMARY_NAME, _summary(analysis, result))
    out.run.tags({"casemate.device": ", ".join(sorted(analysis.devices))})
    track(out, result.rows, prefix=f"analyze/{analysis.study}/", untracked=result.untracked)
    names = (METRICS_NAME, SUMMARY_NAME, *result.tables, *result.arrays)
    out.run.artifacts(*(out.path / name for name in names))


def _write_array(path: Path, array: Array) -> None:
    path.parent.mkdir(exist_ok=True)
    with atomic(path) as temporary, temporary.open("wb") as file:
        np.save(file, np.ascontiguousarray(array), allow_pickle=False)


def _summary(analysis: Analysis, result: StudyResult) -> dict[str, Any]:
    prefix = f"analyze/{analysis.study}/"
    models: dict[str, Any] = {}
    for row in result.rows:
        own = models.setdefault(row.model, {"digest": row.model_digest, "metrics": {}})
        if row.metric not in result.untracked:
            own["metrics"][mlflow_name(row, stage="analyze").removeprefix(prefix)] = row.value
    return {
        "study": analysis.study,
        "settings": plain(analysis.how),
        "seed": analysis.seed,
        "num_items": result.num_items,
        "models": models,
        "details": dict(result.details),
        "headlines": headlines_of(result.rows, result.headlines),
        "devices": sorted(analysis.devices),
    }
