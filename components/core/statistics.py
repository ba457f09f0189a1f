"""95% intervals of accuracies and of their differences, paired or independent; paired tests.

An accuracy has the interval of Wilson (`shares.py`). The interval of a difference combines the
ends of two exact intervals (Clopper & Pearson 1934) by their distances to the estimates (MOVER:
Newcombe 1998, Statistics in Medicine 17:873; Zou & Donner 2008, sec. 2), which makes it
conservative: enumerated over all outcomes of 9 to 80 paired items, it covers the true difference in
at least 93 % of samples, and in less than 95 % only if nine of ten items are discordant.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import special

from components.core.shares import share_of, wilson_interval

CONFIDENCE = 0.95


def clopper_pearson_interval(k: int, n: int) -> tuple[float, float]:
    """Exact 95% interval of a share, k of n (Clopper & Pearson 1934): 2.5% in each tail."""
    _check_count(k, n)
    tail = (1 - CONFIDENCE) / 2
    low = float(special.betaincinv(k, n - k + 1, tail)) if k > 0 else 0.0
    high = float(special.betainccinv(k + 1, n - k, tail)) if k < n else 1.0
    return low, high


def mean_interval(shares: NDArray[np.float64]) -> tuple[float, float]:
    """95% interval of the mean of shares in [0, 1], one per item, e.g. of its correct variants.

    Wilson's interval at the effective number of verdicts, p(1 - p) / (variance of the mean): the
    verdicts of an item depend on each other, so they count at least as one and mostly as few.
    """
    values = np.asarray(shares, dtype=np.float64)
    if values.ndim != 1 or not len(values) or not 0 <= values.min() <= values.max() <= 1:
        raise ValueError(f"expected shares in [0, 1] of at least one item, got {values.shape}")
    mean, n = float(values.mean()), len(values)
    variance = float(values.var(ddof=1)) / n if n > 1 else 0.0
    count = max(float(n), mean * (1 - mean) / variance) if variance > 0 else float(n)
    return wilson_interval(mean * count, count)


def accuracy(correct: NDArray[np.bool_]) -> dict[str, float | int]:
    """Accuracy {"value", "low", "high", "num_items"} from one boolean per item.

    Other types are rejected: the mean of a running total or of counts can look like an accuracy.
    """
    return share_of(*_counted(correct))


def exact_accuracy(correct: NDArray[np.bool_]) -> dict[str, float | int]:
    """The same with the exact interval, as files of attacks and certificates hold it.

    A certificate's file is compared with its votes to the last bit.
    """
    k, n = _counted(correct)
    low, high = clopper_pearson_interval(k, n)
    return {"value": k / n, "low": low, "high": high, "num_items": n}


def _counted(correct: NDArray[np.bool_]) -> tuple[int, int]:
    verdicts = np.asarray(correct)
    if verdicts.dtype != np.bool_ or verdicts.ndim != 1:
        raise ValueError(f"expected (N,) bool, got {verdicts.dtype} of shape {verdicts.shape}")
    if not len(verdicts):
        raise ValueError("the accuracy of no items is undefined")
    return int(verdicts.sum()), len(verdicts)


def difference(k: int, k_before: int, *, n: int, n_before: int) -> dict[str, float]:
    """Difference k / n - k_before / n_before as {"value", "low", "high"}, a 95% interval.

    For independent shares. For positively correlated ones, such as accuracies on the same items,
    the interval is wider than necessary; use `paired_difference`.
    """
    return _combined(k, k_before, n=n, n_before=n_before, correlation=0.0)


def paired_difference(
    correct: NDArray[np.bool_], correct_before: NDArray[np.bool_]
) -> dict[str, float]:
    """Difference of two accuracies on the same items as {"value", "low", "high"}; 95%.

    Items come in the same order. Only discordant items count: the difference is the share won, p,
    minus the share lost, q. An item cannot be both, so the correlation of the two shares is
    -sqrt(pq / ((1 - p)(1 - q))).
    """
    won, lost = discordant(correct, correct_before)
    n = len(correct)
    both = math.sqrt((n - won) * (n - lost))
    correlation = -math.sqrt(won * lost) / both if both else 0.0
    return _combined(won, lost, n=n, n_before=n, correlation=correlation)


def mcnemar_p_value(correct: NDArray[np.bool_], other: NDArray[np.bool_]) -> float:
    """Exact two-sided p-value of equal accuracy on the same items, in the same order.

    McNemar 1947 with the binomial in place of chi-squared: of the discordant items, each is won by
    either side with probability 1/2. 1 where the two sides never differ.
    """
    won, lost = discordant(correct, other)
    return min(1.0, 2 * float(special.bdtr(min(won, lost), won + lost, 0.5)))


def paired_mean_difference(
    shares: NDArray[np.float64], other: NDArray[np.float64]
) -> tuple[dict[str, float], float]:
    """Difference of two means over the same items as {"value", "low", "high"}, 95%, and a p-value.

    For shares in [0, 1] of an item's variants, which McNemar's test does not cover. Student's t of
    the differences per item; the p-value is never below 2 / 2^n, the least of a sign-flip test.
    """
    gaps = np.asarray(shares, dtype=np.float64) - np.asarray(other, dtype=np.float64)
    if gaps.ndim != 1 or not len(gaps):
        raise ValueError(f"expected shares of at least one item, got shape {gaps.shape}")
    n, value = len(gaps), float(gaps.mean())
    if n == 1:
        return {"value": value, "low": -1.0, "high": 1.0}, 1.0
    error = float(gaps.std(ddof=1)) / math.sqrt(n)
    half_width = error * float(special.stdtrit(n - 1, (1 + CONFIDENCE) / 2))
    t = abs(value) / error if error else (math.inf if value else 0.0)
    p_value = max(2 * float(special.stdtr(n - 1, -t)), 2 * 0.5**n)
    interval = {"low": max(-1.0, value - half_width), "high": min(1.0, value + half_width)}
    return {"value": value, **interval}, min(1.0, p_value)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted for their number (Holm 1979), in the same order.

    Where all that are below a limit are rejected, a true hypothesis is among them with a
    probability of at most this limit, however the tests depend on each other.
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = largest
    return adjusted


def discordant(correct: NDArray[np.bool_], other: NDArray[np.bool_]) -> tuple[int, int]:
    """Items that only the first is right about, and those that only the other is."""
    one, two = np.asarray(correct), np.asarray(other)
    if one.dtype != np.bool_ or two.dtype != np.bool_ or one.shape != two.shape:
        raise ValueError(f"expected two equal (N,) bool, got {one.dtype} and {two.dtype}")
    if one.ndim != 1 or not len(one):
        raise ValueError(f"expected verdicts of at least one item, got shape {one.shape}")
    return int((one & ~two).sum()), int((two & ~one).sum())


def _check_count(k: int, n: int) -> None:
    if n < 1 or not 0 <= k <= n:
        raise ValueError(f"need 0 <= k <= n and n >= 1, got {k=}, {n=}")


def _combined(
    k: int, k_before: int, *, n: int, n_before: int, correlation: float
) -> dict[str, float]:
    now, before = k / n, k_before / n_before
    low, high = clopper_pearson_interval(k, n)
    low_before, high_before = clopper_pearson_interval(k_before, n_before)

    def distance(one: float, other: float) -> float:
        return math.sqrt(one**2 + other**2 - 2 * correlation * one * other)

    value = now - before
    return {
        "value": value,
        "low": max(-1.0, value - distance(now - low, high_before - before)),
        "high": min(1.0, value + distance(high - now, before - low_before)),
    }
