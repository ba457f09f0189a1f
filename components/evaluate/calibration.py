"""Calibration: does a confidence of 80 % mean that 80 % of such predictions are right?

Guo et al. 2017, eq. 3: M bins of equal width, bin m holds the confidences in ((m - 1) / M, m / M];
ECE = sum over bins of their share of items times |accuracy - mean confidence|.
"""

from dataclasses import dataclass

import numpy as np

from components.core.shares import wilson_interval
from components.evaluate.metrics import Measurement, null
from components.evaluate.predictions import Predictions


@dataclass(frozen=True, slots=True)
class ReliabilityBin:
    """Predictions with a confidence in (low, high]; null where there are none."""

    low: float
    high: float
    n: int
    confidence: float | None  # mean
    accuracy: float | None
    lo95: float | None
    hi95: float | None


def reliability(found: Predictions, *, num_bins: int) -> list[ReliabilityBin]:
    """The reliability table; a confidence of 0 is in the first bin."""
    confidence = found.confidence
    if len(found) and not 0 <= confidence.min() <= confidence.max() <= 1:
        raise ValueError("confidences must lie in [0, 1]")
    edges = np.arange(num_bins + 1) / num_bins
    places = np.maximum(np.searchsorted(edges, confidence, side="left") - 1, 0)
    table = []
    for place in range(num_bins):
        chosen = places == place
        table.append(_bin(edges[place], edges[place + 1], found.rows(chosen)))
    return table


def _bin(low: float, high: float, part: Predictions) -> ReliabilityBin:
    n, k = len(part), int(part.correct.sum())
    if n == 0:
        return ReliabilityBin(float(low), float(high), 0, None, None, None, None)
    mean = float(part.confidence.mean())
    return ReliabilityBin(float(low), float(high), n, mean, k / n, *wilson_interval(k, n))


def calibration_error(table: list[ReliabilityBin]) -> float | None:
    """ECE of a reliability table; None without items."""
    total = sum(row.n for row in table)
    gaps = [
        row.n * abs(row.accuracy - row.confidence)
        for row in table
        if row.accuracy is not None and row.confidence is not None
    ]
    return sum(gaps) / total if total else None


def measurements(found: Predictions, *, item: str, num_bins: int) -> list[Measurement]:
    """`ece`, and per bin (level 1, 2, ...) `bin_accuracy` and `bin_confidence`."""
    table = reliability(found, num_bins=num_bins)
    error = calibration_error(table)
    if error is None:
        return [null(item=item, metric="ece", why="no items")]
    rows = [Measurement(item=item, metric="ece", value=error, n=len(found))]
    for level, row in enumerate(table, start=1):
        if row.n == 0:
            why = f"no confidence in ({row.low:.3f}, {row.high:.3f}]"
            rows += [
                null(item=item, level=level, metric=metric, why=why)
                for metric in ("bin_accuracy", "bin_confidence")
            ]
            continue
        rows += [
            Measurement(
                item=item,
                level=level,
                metric="bin_accuracy",
                value=row.accuracy,
                n=row.n,
                lo95=row.lo95,
                hi95=row.hi95,
            ),
            Measurement(
                item=item, level=level, metric="bin_confidence", value=row.confidence, n=row.n
            ),
        ]
    return rows
