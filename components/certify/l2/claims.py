"""l2 certificates from votes under Gaussian noise (Cohen et al. 2019, sec. 3.2).

Symbols: n0 draws choose the class, n other draws bound its probability, k of them agree, alpha
failure probability. With probability 1 - alpha per item the smoothed classifier is constant
inside the radius; the noise is assumed to be exactly Gaussian, as in the literature.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from components.certify.l2.bounds import (
    clopper_pearson_lower,
    draws_needed,
    max_radius,
    max_randomized_radius,
    probability_needed,
    radius_lower,
    randomized_lower,
)
from components.certify.l2.predict import ABSTAIN
from components.certify.l2.radius import LEAST_UNIFORM
from components.core.errors import CasemateError
from components.core.seeding import stream_key
from components.core.types import IntArray

PRACTICAL_PROB = 1 - 1e-7  # a larger bound takes tens of millions of unanimous draws


@dataclass(frozen=True, slots=True)
class GaussianClaim:
    """The claim about one item; an abstention has prediction -1 and radius 0."""

    prediction: int
    abstain: bool
    k: int
    n0: int
    n: int
    p_lower: float
    radius: float


def certified_radius(successes: int, draws: int, *, sigma: float, failure_prob: float) -> float:
    """sigma * Phi^-1 of the Clopper-Pearson bound, rounded down, or 0.0 = abstain.

    In pixels of [0, 1] if sigma is. The draws must not be those that chose the class.
    """
    return radius_of_bound(clopper_pearson_lower(successes, draws, failure_prob), sigma=sigma)


def radius_of_bound(p_lower: float, *, sigma: float) -> float:
    """The radius of any valid lower bound; 0.0 (abstain) at 1/2 or below."""
    return radius_lower(p_lower, sigma) if p_lower > 0.5 else 0.0


def certify_counts(
    select_counts: IntArray,
    estimate_counts: IntArray,
    *,
    sigma: float,
    alpha: float,
    uniform: float | None = None,
) -> GaussianClaim:
    """CERTIFY of Cohen et al. 2019: (C,) counts of two disjoint sets of draws -> class and radius.

    The class comes from the first set (ties to the lowest), the bound from the second: using the
    same draws for both would bias the bound. A wrong class has probability <= 1/2, so the same
    bound catches it. With `uniform`, from `registered_uniform`, the bound is the randomised
    one.
    """
    n0, n = int(select_counts.sum()), int(estimate_counts.sum())
    if select_counts.shape != estimate_counts.shape or n0 < 1 or n < 1:
        raise ValueError(f"need counts of the same classes with draws in both, got {n0=}, {n=}")
    chosen = int(np.argmax(select_counts))
    k = int(estimate_counts[chosen])
    if uniform is None:
        p_lower = clopper_pearson_lower(k, n, alpha)
    else:
        p_lower = randomized_lower(k, n, alpha, uniform=uniform)
    radius = radius_of_bound(p_lower, sigma=sigma)
    abstain = radius == 0.0
    return GaussianClaim(ABSTAIN if abstain else chosen, abstain, k, n0, n, p_lower, radius)


def registered_uniform(*, run_seed: int, item_id: str) -> float:
    """The u of an item for the randomised bound: fixed by seed and item id before any draw.

    No other u may be tried: choosing among several would spend the failure probability twice.
    """
    bits = np.random.Philox(key=stream_key(run_seed, "rcp", item_id, 0))
    return float(np.random.Generator(bits).random())


def check_can_certify(*, n: int, alpha: float) -> None:
    """Reject settings under which every item must abstain: even k = n gives alpha^(1/n) <= 1/2."""
    if not 0 < alpha < 1:
        raise CasemateError("certify.failure_prob", alpha, "is outside (0, 1); usual is 0.001")
    if n < 1 or clopper_pearson_lower(n, n, alpha) <= 0.5:
        needed = draws_needed(probability_needed(0.0, 1.0), alpha)
        raise CasemateError(
            "certify.num_estimate",
            n,
            f"draws can never exceed probability 1/2 at failure_prob {alpha}; use {needed} or more",
        )


def check_radii(
    radii: Sequence[float], *, sigma: float, n: int, alpha: float, randomized: bool = False
) -> None:
    """Reject a radius that even n unanimous draws cannot certify, before any draw."""
    if randomized:
        check_randomized(alpha)
        most = max_randomized_radius(sigma=sigma, n=n, alpha=alpha)
        spent = alpha / LEAST_UNIFORM  # u p^n = alpha for unanimous draws
    else:
        check_can_certify(n=n, alpha=alpha)
        most, spent = max_radius(sigma=sigma, n=n, alpha=alpha), alpha
    refuse_beyond(
        most, radii, sigma=sigma, n=n, alpha=alpha, needed=lambda p: draws_needed(p, spent)
    )


def refuse_beyond(
    most: float,
    radii: Sequence[float],
    *,
    sigma: float,
    n: int,
    alpha: float,
    needed: Callable[[float], int],
) -> None:
    """Reject radii above `most`; `needed` gives the unanimous draws that bound a probability."""
    for radius in radii:
        if radius <= most:
            continue
        p = probability_needed(radius, sigma)
        if p < PRACTICAL_PROB:
            remedy = f"raise num_estimate to {needed(p)} or more, or drop it"
        else:
            remedy = "no practical number of draws reaches it; raise sigma or drop it"
        raise CasemateError(
            "certify.radii",
            radius,
            f"is above {most:.4f}, the most that {n} draws of sigma {sigma:g} certify at "
            f"failure_prob {alpha:g}; {remedy}",
        )


def check_randomized(alpha: float) -> None:
    """Reject a failure probability that is too large for the randomised bound."""
    if not 0 < alpha < LEAST_UNIFORM:
        remedy = f"is outside (0, {LEAST_UNIFORM}), which the randomised bound needs"
        raise CasemateError("certify.failure_prob", alpha, remedy)
