"""Largest radius that unanimous draws can certify, in closed form: the limit for recipes.

Plain Python, so that reading a recipe loads no numerical library. The exact tests, which decide
the last bit, are `claims.check_radii` and `sequential.SequentialPlan`; a test compares them.

Symbols: n draws that all agree, alpha failure probability, sigma noise, Phi the normal
distribution function.
"""

import math
from bisect import bisect_left
from statistics import NormalDist
from typing import Literal

Method = Literal["fixed", "sequential", "randomized"]
LEAST_UNIFORM = 0.05  # keeps the randomised bound of unanimous draws below 1
SEQUENTIAL_SHARE = 0.9  # of alpha; the rest is for the exact bound at the last draw
FINAL_SHARE = 1 - SEQUENTIAL_SHARE
MANY_DRAWS = 10**8  # beyond it a radius counts as impossible


def unanimous_bound(n: int, *, alpha: float, method: Method) -> float:
    """The largest lower bound of a probability that n draws can give."""
    if method == "randomized":
        return float(min(alpha / LEAST_UNIFORM, 1.0) ** (1 / n))
    if method == "sequential":
        share = SEQUENTIAL_SHARE * alpha
        return max(_sequential_bound(n, share), float((FINAL_SHARE * alpha) ** (1 / n)))
    return float(alpha ** (1 / n))


def _sequential_bound(n: int, alpha: float) -> float:
    """The largest p with E_n(p) >= 1/alpha for k = n, E = (1 - p^(n+1)) / ((n+1) (1-p) p^n)."""
    low, high = 0.0, n / (n + 1)
    while low < (middle := (low + high) / 2) < high:
        log_e = math.log1p(-(middle ** (n + 1))) - math.log(n + 1)
        log_e -= math.log1p(-middle) + n * math.log(middle)
        low, high = (middle, high) if log_e >= -math.log(alpha) else (low, middle)
    return low


def max_certifiable_radius(*, sigma: float, n: int, alpha: float, method: Method) -> float:
    """The largest radius that n draws can certify: sigma * Phi^-1 of their bound, 0 if none."""
    bound = unanimous_bound(n, alpha=alpha, method=method)
    return sigma * NormalDist().inv_cdf(bound) if 0.5 < bound < 1 else 0.0


def draws_to_certify(radius: float, *, sigma: float, alpha: float, method: Method) -> int | None:
    """The fewest draws that can certify this radius; None: no practical number suffices."""

    def can(n: int) -> bool:
        return max_certifiable_radius(sigma=sigma, n=n, alpha=alpha, method=method) >= radius

    if not can(MANY_DRAWS):
        return None
    return 1 + bisect_left(range(1, MANY_DRAWS), True, key=can)
