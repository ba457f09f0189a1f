"""Certified accuracy over radii: one curve per sigma, their envelope, and single figures.

certified accuracy(r) = mean[correct and radius >= r]; all items count, abstentions too, and a
radius is never rounded up (Cohen et al. 2019, sec. 4). Each claim is true with probability
1 - alpha on its own; `num_possible_failures` turns that into one statement about all of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from components.core.statistics import accuracy
from components.core.types import FloatArray, IntArray

BoolArray = NDArray[np.bool_]  # (N,) correct and not abstained


@dataclass(frozen=True, slots=True)
class CertifiedCurve:
    """Certified accuracy of one sigma at (R,) radii, with its 95% interval at each."""

    sigma: float
    radii: FloatArray
    values: FloatArray
    low: FloatArray
    high: FloatArray
    num_items: int


@dataclass(frozen=True, slots=True)
class Envelope:
    """The best curve at each of (R,) radii.

    The convention of the literature, and optimistic: sigma is chosen per radius on the reported
    items, and no single smoothed classifier attains it. Therefore it has no interval.
    """

    radii: FloatArray
    values: FloatArray
    sigmas: FloatArray  # sigma of the best curve; the smallest among equals
    num_items: int


@dataclass(frozen=True, slots=True)
class BoundDistribution:
    """Distribution of the lower bounds of the class probabilities over the items."""

    edges: FloatArray  # (E + 1,) from 0 to 1; bins include their left edge, the last one both
    counts: IntArray  # (E,)
    quantiles: dict[float, float]
    num_items: int


def certified_curve(
    correct: BoolArray, radius: ArrayLike, *, sigma: float, radii: ArrayLike
) -> CertifiedCurve:
    """Certified accuracy at each radius; at 0 it is the share of items classified correctly."""
    item_radii = _radii_of(correct, radius)
    at = np.asarray(radii, dtype=np.float64)
    if at.ndim != 1 or not len(at) or not ((at >= 0) & np.isfinite(at)).all():
        raise ValueError("need a list of finite radii that are not negative")
    points = [accuracy(correct & (item_radii >= r)) for r in at]
    values, low, high = (
        np.array([point[name] for point in points]) for name in ("value", "low", "high")
    )
    return CertifiedCurve(sigma, at, values, low, high, len(item_radii))


def envelope(curves: Sequence[CertifiedCurve]) -> Envelope:
    """The pointwise maximum of curves over the same radii and equally many items."""
    if not curves:
        raise ValueError("an envelope needs at least one curve")
    ordered = sorted(curves, key=lambda curve: curve.sigma)
    first = ordered[0]
    for curve in ordered[1:]:
        if not np.array_equal(curve.radii, first.radii) or curve.num_items != first.num_items:
            raise ValueError("curves of other radii or other items have no common envelope")
    values = np.stack([curve.values for curve in ordered])  # (S, R)
    best = values.argmax(axis=0)
    sigmas = np.array([curve.sigma for curve in ordered])[best]
    return Envelope(first.radii, values.max(axis=0), sigmas, first.num_items)


def average_certified_radius(correct: BoolArray, radius: ArrayLike) -> float:
    """mean[radius * correct] (Zhai et al. 2020, sec. 3): the area below the certified curve."""
    item_radii = _radii_of(correct, radius)
    return math.fsum(item_radii[correct]) / len(item_radii)


def bound_distribution(p_lower: ArrayLike, *, num_bins: int = 20) -> BoundDistribution:
    """Histogram and quantiles of (N,) lower bounds; abstentions are below 1/2."""
    bounds = np.asarray(p_lower, dtype=np.float64)
    if bounds.ndim != 1 or not len(bounds) or not ((bounds >= 0) & (bounds <= 1)).all():
        raise ValueError("need lower bounds in [0, 1], at least one")
    counts, edges = np.histogram(bounds, bins=num_bins, range=(0.0, 1.0))
    levels = (0.05, 0.25, 0.5, 0.75, 0.95)
    quantiles = np.quantile(bounds, levels, method="lower").tolist()  # lower: never rounded up
    return BoundDistribution(
        edges, counts.astype(np.int64), dict(zip(levels, quantiles, strict=True)), len(bounds)
    )


def num_possible_failures(*, num_items: int, failure_prob: float, rho: float = 0.001) -> int:
    """The smallest t with P(Bin(N, alpha) > t) <= rho: how many claims may be false among N.

    With probability 1 - rho, certified accuracy minus t/N holds for the smoothed classifier itself.
    Needs noise that is independent between items.
    """
    if num_items < 1 or not 0 < failure_prob < 1 or not 0 < rho < 1:
        raise ValueError("need at least one item, and probabilities inside (0, 1)")
    t = int(stats.binom.isf(rho, num_items, failure_prob))
    while stats.binom.sf(t, num_items, failure_prob) > rho:  # isf is found by iteration
        t += 1
    return t


def _radii_of(correct: BoolArray, radius: ArrayLike) -> FloatArray:
    item_radii = np.asarray(radius, dtype=np.float64)
    if correct.dtype != np.bool_ or correct.ndim != 1 or correct.shape != item_radii.shape:
        raise ValueError(
            f"need (N,) bool and (N,) radii, got {correct.dtype} and {item_radii.shape}"
        )
    if not len(item_radii) or not ((item_radii >= 0) & np.isfinite(item_radii)).all():
        raise ValueError("need finite radii that are not negative, at least one")
    return item_radii
