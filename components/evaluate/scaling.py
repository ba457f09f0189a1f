"""Error against model size: log10(error) = intercept + slope * log10(parameters in millions).

Bhojanapalli et al. 2021, Figs. 4 and 30: one line per family of models and pre-training set, by
least squares over three models or more. The 95 % intervals are those of linear regression:
Student's t with n - 2 degrees of freedom, wide where models are few.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from scipy import special

from components.core.errors import CasemateError
from components.core.statistics import CONFIDENCE
from components.evaluate.metrics import MetricRow

FEWEST_MODELS = 3


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """One model: parameters in millions, and its error on n items with its interval, if any."""

    model: str
    params_m: float
    error: float
    n: int | None = None
    interval: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class ScalingFit:
    """The line of a group of models; null with the reason where there is none."""

    family: str
    pretrain: str | None
    points: tuple[ScalingPoint, ...]
    slope: float | None = None
    intercept: float | None = None
    slope_interval: tuple[float, float] | None = None
    intercept_interval: tuple[float, float] | None = None
    why_not: str | None = None


def fit_line(
    points: Iterable[ScalingPoint], *, family: str, pretrain: str | None = None
) -> ScalingFit:
    """The fit of one group; a model without error, or too few sizes, leaves it without a line."""
    ordered = tuple(sorted(points, key=lambda point: (point.params_m, point.model)))
    why = _why_not(ordered)
    if why is not None:
        return ScalingFit(family, pretrain, ordered, why_not=why)
    x = np.log10([point.params_m for point in ordered])
    y = np.log10([point.error for point in ordered])
    n, around = len(x), x - x.mean()
    spread = float(around @ around)
    slope = float(around @ y) / spread
    intercept = float(y.mean()) - slope * float(x.mean())
    residual = y - intercept - slope * x
    variance = float(residual @ residual) / (n - 2)
    quantile = float(special.stdtrit(n - 2, (1 + CONFIDENCE) / 2))
    slope_half = quantile * math.sqrt(variance / spread)
    intercept_half = quantile * math.sqrt(variance * (1 / n + float(x.mean()) ** 2 / spread))
    return ScalingFit(
        family,
        pretrain,
        ordered,
        slope,
        intercept,
        (slope - slope_half, slope + slope_half),
        (intercept - intercept_half, intercept + intercept_half),
    )


def scaling_fits(
    rows: Iterable[MetricRow],
    *,
    suite: str,
    item: str,
    metric: str,
    level: float | None = None,
) -> list[ScalingFit]:
    """One fit per family and pre-training set, from the accuracy `metric` of several runs.

    Rows without a value, a family or a number of parameters are not models of a line. All rows must
    be about the same data and preprocessing, and a model must have one value: average seeds first.
    """
    groups: dict[tuple[str, str], dict[str, ScalingPoint]] = defaultdict(dict)
    for row in _comparable(rows, (suite, item, metric, level)):
        if row.value is None or row.family is None or row.params_m is None:
            continue
        ends = None if row.lo95 is None or row.hi95 is None else (1 - row.hi95, 1 - row.lo95)
        point = ScalingPoint(row.model, row.params_m, 1 - row.value, row.n, ends)
        group = groups[row.family, row.pretrain or ""]
        if group.setdefault(row.model, point) != point:
            remedy = f"has two values of {suite} {item} {metric}; average them first"
            raise CasemateError("scaling", row.model, remedy)
    return [
        fit_line(group.values(), family=family, pretrain=pretrain or None)
        for (family, pretrain), group in sorted(groups.items())
    ]


def _comparable(
    rows: Iterable[MetricRow], place: tuple[str, str, str, float | None]
) -> list[MetricRow]:
    """The rows at one place of the table; an error if they mix data or preprocessing."""
    found = [row for row in rows if (row.suite, row.item, row.metric, row.level) == place]
    for name in ("dataset_digest", "resize", "fidelity"):
        first = {getattr(row, name): row for row in reversed(found)}  # a row of each value
        if len(first) > 1:
            a, b = list(first.values())[-2:]
            remedy = (
                f"differ in {name} ({a.dataset} {str(getattr(a, name))[:8]}, {b.dataset} "
                f"{str(getattr(b, name))[:8]}); name the folders of runs on the same images"
            )
            raise CasemateError("scaling", f"{a.model} and {b.model}", remedy)
    return found


def _why_not(points: tuple[ScalingPoint, ...]) -> str | None:
    if len(points) < FEWEST_MODELS:
        return f"{len(points)} models; a line needs {FEWEST_MODELS}"
    if len({point.params_m for point in points}) < 2:
        return "all models have the same number of parameters"
    perfect = [point.model for point in points if not 0 < point.error <= 1]
    return f"{perfect[0]} has no errors: the logarithm of 0 is undefined" if perfect else None
