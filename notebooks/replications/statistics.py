"""Statistics over a few seeds: means, ranges, t-intervals, paired differences.

An interval over seeds is about trainings like these on these test items: chance in weights, order
and augmentation, not in the choice of items. Accuracies are percentages, differences are points.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from scipy import stats

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """The mean of one value per seed, its range and its t-interval."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.values) < 2:
            raise ValueError("one seed has no spread: an interval needs at least two")

    @property
    def mean(self) -> float:
        return mean(self.values)

    @property
    def interval(self) -> tuple[float, float]:
        """Student 1908: mean -+ t s / sqrt(n), with n - 1 degrees of freedom."""
        n = len(self.values)
        quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1))
        half = quantile * stdev(self.values) / math.sqrt(n)
        return self.mean - half, self.mean + half

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.mean:.1f} [{low:.1f}, {high:.1f}]"

    @property
    def range(self) -> str:
        return f"{min(self.values):.1f} to {max(self.values):.1f}"


def paired(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """`first` minus `second`, seed by seed: effects of the seed on both cancel."""
    return Estimate(tuple(a - b for a, b in zip(first, second, strict=True)))


def verdict(difference: Estimate, *, expected: int) -> str:
    """Whether a difference has the published sign: +1, -1, or 0 for none worth mentioning."""
    low, high = difference.interval
    if low <= 0 <= high:
        return "not decided" if expected else "no difference seen"
    if not expected:
        return "a difference"
    return "reproduced" if (low > 0) == (expected > 0) else "the opposite"
