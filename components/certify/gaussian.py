"""l2 certificates from votes under Gaussian noise (Cohen et al. 2019, sec. 3.2).

Symbols: n0 draws choose the class, n other draws bound its probability, k of them agree, alpha
failure probability. With probability 1 - alpha per item the smoothed classifier is constant
inside the radius; this takes noise for exactly Gaussian, as all of this literature does.
"""

from dataclasses import dataclass

import numpy as np
from scipy import stats

from components.certify.bounds import clopper_pearson_lower, radius_lower
from components.core.errors import CasemateError
from components.core.types import IntArray

ABSTAIN = -1


@dataclass(frozen=True, slots=True)
class GaussianClaim:
    """What may be said about one item; an abstention has prediction -1 and radius 0."""

    prediction: int
    abstain: bool
    k: int
    n0: int
    n: int
    p_lower: float
    radius: float


def certify_counts(
    select_counts: IntArray, estimate_counts: IntArray, *, sigma: float, alpha: float
) -> GaussianClaim:
    """CERTIFY of Cohen et al. 2019: (C,) counts of two disjoint sets of draws -> class and radius.

    The class comes from the first set (ties to the lowest), the bound from the second: using the
    same draws for both would bias the bound. A wrong class has probability <= 1/2, so the same
    bound catches it.
    """
    n0, n = int(select_counts.sum()), int(estimate_counts.sum())
    if select_counts.shape != estimate_counts.shape or n0 < 1 or n < 1:
        raise ValueError(f"need counts of the same classes with draws in both, got {n0=}, {n=}")
    chosen = int(np.argmax(select_counts))
    k = int(estimate_counts[chosen])
    p_lower = clopper_pearson_lower(k, n, alpha)
    if p_lower <= 0.5:
        return GaussianClaim(ABSTAIN, True, k, n0, n, p_lower, 0.0)
    return GaussianClaim(chosen, False, k, n0, n, p_lower, radius_lower(p_lower, sigma))


def predict_counts(counts: IntArray, *, alpha: float) -> int:
    """PREDICT of Cohen et al. 2019: the top class, or -1 when its lead may be chance.

    Two-sided exact binomial test of the two leaders at 1/2 (Hung & Fithian 2019). A returned
    class differs from the true top class with probability at most alpha.
    """
    if counts.ndim != 1 or len(counts) < 2 or counts.sum() < 1:
        raise ValueError("need the counts of at least two classes and at least one draw")
    first, second = np.argsort(-counts, kind="stable")[:2]  # stable: ties to the lowest class
    top, runner_up = int(counts[first]), int(counts[second])
    p_value = float(stats.binomtest(top, top + runner_up, 0.5).pvalue)
    return int(first) if p_value <= alpha else ABSTAIN


def check_can_certify(*, n: int, alpha: float) -> None:
    """Refuse settings under which every item must abstain: even k = n gives alpha^(1/n) <= 1/2."""
    if not 0 < alpha < 1:
        raise CasemateError("certify.failure_prob", alpha, "is outside (0, 1); usual is 0.001")
    if n < 1 or clopper_pearson_lower(n, n, alpha) <= 0.5:
        needed = next(m for m in range(max(n, 0) + 1, 10_000) if alpha ** (1 / m) > 0.5)
        raise CasemateError(
            "certify.num_estimate",
            n,
            f"draws can never exceed probability 1/2 at failure_prob {alpha}; use {needed} or more",
        )
