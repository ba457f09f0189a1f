"""Accuracy as an estimate: a share of items with its exact 95% interval."""

import numpy as np
from numpy.typing import NDArray
from scipy import special

CONFIDENCE = 0.95


def clopper_pearson_interval(k: int, n: int) -> tuple[float, float]:
    """Exact 95% interval of a share, k of n (Clopper & Pearson 1934): 2.5% in each tail."""
    if n < 1 or not 0 <= k <= n:
        raise ValueError(f"need 0 <= k <= n and n >= 1, got {k=}, {n=}")
    tail = (1 - CONFIDENCE) / 2
    low = float(special.betaincinv(k, n - k + 1, tail)) if k > 0 else 0.0
    high = float(special.betainccinv(k + 1, n - k, tail)) if k < n else 1.0
    return low, high


def accuracy(correct: NDArray[np.bool_]) -> dict[str, float | int]:
    """{"value", "low", "high", "num_items"} of one verdict per item; all items count.

    Only booleans are taken: a running total or a count in this place once passed for accuracy
    elsewhere.
    """
    verdicts = np.asarray(correct)
    if verdicts.dtype != np.bool_ or verdicts.ndim != 1:
        raise ValueError(f"expected (N,) bool, got {verdicts.dtype} of shape {verdicts.shape}")
    if not len(verdicts):
        raise ValueError("the accuracy of no items is undefined")
    k, n = int(verdicts.sum()), len(verdicts)
    low, high = clopper_pearson_interval(k, n)
    return {"value": k / n, "low": low, "high": high, "num_items": n}
