"""The long table of results, `metrics.parquet`: one row per number.

A suite yields measurements; `rows_of` adds model and dataset. A number that cannot be computed is
null, with the reason as a flag. Rows are sorted and all options of the file are fixed, so
equal rows give equal bytes.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from components.core.errors import CasemateError
from components.core.shares import wilson_interval
from components.core.tables import read_table, schema_of, write_table

METRICS_NAME = "metrics.parquet"
ALL = "all"  # item of numbers about a suite as a whole
NULL = "null: "  # begins the flag that explains a missing value
SCHEMA = schema_of(
    "model: string, model_digest: string, family: string, arch: string, params_m: float64, "
    "gmacs: float64, pretrain: string, recipe: string, dataset: string, dataset_digest: string, "
    "suite: string, item: string, level: float64, metric: string, value: float64, n: int64, "
    "lo95: float64, hi95: float64, seed: int64, resize: string, fidelity: string"
).append(pa.field("flags", pa.list_(pa.string())))
NUMBERS = ("value", "n", "lo95", "hi95", "flags")  # all other columns say what was measured


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What a number belongs to: a model on a dataset, and how it was evaluated."""

    model: str
    model_digest: str
    family: str | None = None  # e.g. vit, resnet: models of one family share a line of a figure
    arch: str | None = None
    params_m: float | None = None  # parameters in millions
    gmacs: float | None = None
    pretrain: str | None = None
    recipe: str | None = None
    dataset: str
    dataset_digest: str
    seed: int
    resize: str | None = None  # `squash` or `timm`
    fidelity: str | None = None  # of corruptions: `released` or `raw`


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One number of a suite; `item` and `level` say which part of it, e.g. snow at severity 3."""

    item: str
    metric: str
    value: float | None
    level: float | None = None
    n: int | None = None
    lo95: float | None = None
    hi95: float | None = None
    flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "flags", tuple(sorted(set(self.flags))))
        if self.level is not None:
            object.__setattr__(self, "level", float(self.level) + 0.0)  # -0.0 becomes 0.0
        numbers = (self.value, self.lo95, self.hi95, self.level)
        if any(number is not None and not math.isfinite(number) for number in numbers):
            raise ValueError(f"{self.item} {self.metric}: numbers must be finite, got {numbers}")
        if self.value is None and not any(flag.startswith(NULL) for flag in self.flags):
            raise ValueError(f"{self.item} {self.metric}: a null value needs a reason")


@dataclass(frozen=True, kw_only=True)
class MetricRow(Subject, Measurement):
    """A row of the table: the columns of `SCHEMA`."""

    suite: str


def share(
    correct: NDArray[np.bool_],
    *,
    item: str,
    metric: str = "accuracy",
    level: float | None = None,
    flags: Iterable[str] = (),
) -> Measurement:
    """The share of true verdicts with its Wilson interval; null if there are none."""
    verdicts = np.asarray(correct)
    if verdicts.dtype != np.bool_ or verdicts.ndim != 1:
        raise ValueError(f"expected (N,) bool, got {verdicts.dtype} of shape {verdicts.shape}")
    k, n = int(verdicts.sum()), len(verdicts)
    if n == 0:
        return null(item=item, metric=metric, level=level, why="no items", flags=flags)
    low, high = wilson_interval(k, n)
    return Measurement(
        item=item,
        metric=metric,
        level=level,
        value=k / n,
        n=n,
        lo95=low,
        hi95=high,
        flags=tuple(flags),
    )


def null(
    *,
    item: str,
    metric: str,
    why: str,
    level: float | None = None,
    flags: Iterable[str] = (),
) -> Measurement:
    """A number that cannot be computed, with the reason."""
    return Measurement(
        item=item, metric=metric, level=level, value=None, flags=(*flags, NULL + why)
    )


def rows_of(subject: Subject, suite: str, found: Iterable[Measurement]) -> list[MetricRow]:
    """The measurements of one suite as rows."""
    shared = asdict(subject)
    return [MetricRow(**shared, **asdict(one), suite=suite) for one in found]


def write_metrics(path: Path, rows: Iterable[MetricRow]) -> None:
    """Store rows, sorted; equal rows in any order give equal bytes."""
    plain = [asdict(row) for row in rows]
    ordered = sorted(plain, key=_sort_key)
    for row, following in pairwise(ordered):
        if _sort_key(row) == _sort_key(following):
            raise ValueError(f"two rows for {row['model']} {row['suite']} {_place(row)}")
    columns = [pa.array([row[f.name] for row in ordered], f.type) for f in SCHEMA]
    write_table(path, pa.Table.from_arrays(columns, schema=SCHEMA))


def read_metrics(path: Path) -> list[MetricRow]:
    """The rows of a file; an error names it if it has other columns."""
    table = read_table(path)
    if not table.schema.remove_metadata().equals(SCHEMA):
        raise CasemateError("metrics", path, "is not a table of metrics: its columns differ")
    return [MetricRow(**{**row, "flags": tuple(row["flags"])}) for row in table.to_pylist()]


def mlflow_name(row: MetricRow, *, stage: str = "evaluate") -> str:
    """`<stage>/<suite>/<item>[/s<level>]/<metric>`; without the item where it is all."""
    item = [] if row.item == ALL else [row.item]
    level = [] if row.level is None else [f"s{row.level:g}"]
    return "/".join([stage, row.suite, *item, *level, row.metric])


def _sort_key(row: Mapping[str, Any]) -> tuple[tuple[bool, Any], ...]:
    """Every column that says what was measured; nulls last."""
    names = [name for name in SCHEMA.names if name not in NUMBERS]
    return tuple((row[name] is None, 0 if row[name] is None else row[name]) for name in names)


def _place(row: Mapping[str, Any]) -> str:
    level = "" if row["level"] is None else f" {row['level']:g}"
    return f"{row['item']}{level} {row['metric']}"
