"""A confidence sequence of a probability: bounds that hold at all times at once.

A one-sided mixture e-process with a uniform mixing density (Ville 1939; Robbins 1970, Ann. Math.
Statist. 41:1397; Howard et al. 2021, Ann. Statist. 49:1055, sec. 3) is inverted, so that looking
early, often, or again after a restart costs nothing. At every single time the interval contains
that of Clopper & Pearson at the same level: E grows with k, so that rejecting at E >= 1/alpha is a
test of an upper tail with at most probability alpha, and theirs is the most powerful of these.

Symbols: k of the first t draws are successes, q their probability, p0 a value that q may have,
alpha failure probability, E the e-process, L the lower confidence sequence.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from components.core.types import FloatArray

BAND = 0.05  # probability that the band of a share ever misses it
LARGEST_FAILURE_PROB = 0.3  # below 1/e, where {p0 : E >= 1/alpha} is an interval (0, L]


def log_e_value(k: ArrayLike, t: ArrayLike, p0: ArrayLike) -> FloatArray:
    """ln E_t(p0), E = 1/(1-p0) * Int_{p0}^1 p^k (1-p)^(t-k) dp / (p0^k (1-p0)^(t-k)).

    For q <= p0 every p > p0 makes a nonnegative supermartingale that starts at 1, so their mean
    does too, and P(E_t >= 1/alpha for some t) <= alpha (Ville 1939).
    """
    k, t, p0 = (np.asarray(value, dtype=np.float64) for value in (k, t, p0))
    with np.errstate(divide="ignore"):  # a tail that underflows is not evidence: -inf
        tail = np.log(special.betaincc(k + 1, t - k + 1, p0))
    likelihood = k * np.log(p0) + (t - k + 1) * np.log1p(-p0)
    return np.asarray(special.betaln(k + 1, t - k + 1) + tail - likelihood)


def log_threshold(t: ArrayLike, failure_prob: float) -> FloatArray:
    """ln(1/alpha) and a margin above the rounding of ln E, whose terms grow like t ln t."""
    return np.asarray(-math.log(failure_prob) + 1e-9 + 1e-14 * np.asarray(t, dtype=np.float64))


@lru_cache(maxsize=65536)
def lower_confidence(k: int, t: int, failure_prob: float) -> float:
    """L_t, rounded down: P(q <= L_t for some t) <= alpha, for any number and times of looks.

    The largest p0 with E_t(p0) >= 1/alpha. E decreases in p0 up to k/(t+1) and is below e beyond,
    so that for alpha < 1/e the set is an interval and bisection finds its end.
    """
    if not 0 <= k <= t or t < 1:
        raise ValueError(f"need 0 <= k <= t and t >= 1, got {k=}, {t=}")
    if not 0 < failure_prob <= LARGEST_FAILURE_PROB:
        raise ValueError(f"alpha must be in (0, {LARGEST_FAILURE_PROB}], got {failure_prob}")
    barrier = float(log_threshold(t, failure_prob))
    low, high = 0.0, k / (t + 1)
    while low < (middle := (low + high) / 2) < high:
        enough = float(log_e_value(k, t, middle)) >= barrier
        low, high = (middle, high) if enough else (low, middle)
    return low


def anytime_interval(k: int, t: int, failure_prob: float) -> tuple[float, float]:
    """Both ends of a confidence sequence at level alpha, half of it on each side."""
    half = failure_prob / 2
    return lower_confidence(k, t, half), 1 - lower_confidence(t - k, t, half)


@dataclass(frozen=True, slots=True)
class ShareSoFar:
    """A share of `total` items of which some are decided: `held` of the first `seen`.

    Only items without an undecided one before them are seen: easy items may be decided first.
    """

    held: int
    seen: int
    total: int
    least: int  # items that are known to count in the end, seen or not
    most: int  # items that may still count

    @property
    def value(self) -> float:
        return self.held / self.seen

    def band(self) -> tuple[float, float]:
        """A band for the final share, by all that is decided.

        It holds at all times at once with probability 1 - `BAND` if the order of items is random.
        """
        low, high = anytime_interval(self.held, self.seen, BAND)
        return max(low, self.least / self.total), min(high, self.most / self.total)
