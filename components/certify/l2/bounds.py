"""Exact binomial bounds and radii, always rounded to the safe side, in float64.

Symbols: k successes in n draws, alpha failure probability, p the lower bound, Phi the normal
distribution function, u a uniform number drawn once.
"""

import math
from decimal import Decimal, localcontext
from functools import lru_cache

from scipy import special

from components.certify.l2.radius import LEAST_UNIFORM

STEP = 1e-12  # decrement of the bound while its check fails
DIGITS = 50  # precision of the arithmetic that decides the last bit of a radius
GUARD = Decimal("1e-40")  # far above the error of that arithmetic, far below one float64 step
PI = Decimal("3.14159265358979323846264338327950288419716939937510582097")


@lru_cache(maxsize=65536)
def clopper_pearson_lower(successes: int, draws: int, failure_prob: float) -> float:
    """Lower bound of a success probability at confidence 1 - alpha (Clopper & Pearson 1934).

    The alpha-quantile of Beta(k, n-k+1), or 0 for k = 0. The quantile is found by iteration, so
    it is then checked against its definition, P(Bin(n, p) >= k) <= alpha, and moved down until
    that holds, for any rounding of the tail.
    """
    k, n, alpha = successes, draws, failure_prob
    _check_counts(k, n, alpha)
    if k == 0:
        return 0.0
    level = _surely_below(alpha, n)
    p = level ** (1 / n) if k == n else float(special.betaincinv(k, n - k + 1, level))
    while special.betainc(k, n - k + 1, p) > level:  # = P(Bin(n, p) >= k)
        p = max(p - STEP, 0.0)
    return p


def _surely_below(alpha: float, n: int) -> float:
    """The largest computed tail for which the true one is certainly at or below alpha.

    The library's incomplete beta is off by up to 5e-16 sqrt(n) of its value (against 50 digits, up
    to n = 1e8): enough to raise a bound by its last bit, hence a radius by several. Twenty times as
    much costs a bound less than 1e-12.
    """
    return alpha * (1 - 1e-12 - 1e-14 * math.sqrt(n))


def randomized_lower(successes: int, draws: int, failure_prob: float, *, uniform: float) -> float:
    """Lower bound whose level is exactly alpha: P_p(S > k) + u P_p(S = k) = alpha solved for p.

    Randomised Clopper-Pearson (Stevens 1950; for smoothing Voracek 2024). Valid only if u is
    drawn once per item, before its votes are known, and never again. A larger u lowers the bound
    and keeps it valid, so u is raised to 0.05: otherwise u <= alpha with k = n would claim p = 1.
    """
    k, n, alpha = successes, draws, failure_prob
    _check_counts(k, n, alpha)
    if not 0 <= uniform < 1:
        raise ValueError(f"u must be in [0, 1), got {uniform}")
    if alpha >= LEAST_UNIFORM:
        raise ValueError(f"a randomised bound needs alpha < {LEAST_UNIFORM}, got {alpha}")
    if k == 0:
        return 0.0  # at p = 0 the left side is already u, which exceeds alpha
    u = max(uniform, LEAST_UNIFORM)

    def failure(p: float) -> float:  # a mean of two tails: no difference, hence no cancellation
        above = special.betainc(k + 1, n - k, p) if k < n else 0.0  # P(Bin(n, p) > k)
        return float((1 - u) * above + u * special.betainc(k, n - k + 1, p))

    level = _surely_below(alpha, n)
    low = clopper_pearson_lower(k, n, alpha)  # u = 1
    high = clopper_pearson_lower(k + 1, n, alpha) if k < n else 1.0  # u = 0
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if failure(middle) <= level else (low, middle)
    return low


def _check_counts(k: int, n: int, alpha: float) -> None:
    if not 0 <= k <= n or n < 1:
        raise ValueError(f"need 0 <= k <= n and n >= 1, got {k=}, {n=}")
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must be in (0, 1), got {alpha}")


@lru_cache(maxsize=65536)
def radius_lower(p_lower: float, sigma: float) -> float:
    """The largest float64 r <= sigma * Phi^-1(p_lower) (Cohen et al. 2019, Theorem 1).

    The library quantile is only a first guess: Phi(r / sigma) <= p_lower is decided with 50
    digits, and r moves bit by bit to the last value for which it holds. The result does not
    depend on the library's rounding.
    """
    if not 0.5 <= p_lower < 1:
        raise ValueError(f"a radius needs a bound in [1/2, 1), got {p_lower}")
    if not (sigma > 0 and math.isfinite(sigma)):
        raise ValueError(f"sigma must be positive and finite, got {sigma}")
    if p_lower == 0.5:
        return 0.0
    radius = sigma * float(special.ndtri(p_lower))
    while not _within(radius, p_lower=p_lower, sigma=sigma):
        radius = math.nextafter(radius, 0.0)
    while _within(above := math.nextafter(radius, math.inf), p_lower=p_lower, sigma=sigma):
        radius = above
    return radius


@lru_cache(maxsize=4096)
def probability_needed(radius: float, sigma: float) -> float:
    """The smallest float64 p above 1/2 with radius_lower(p, sigma) >= radius; 1 if there is none.

    Phi(radius / sigma) rounded up, decided by the same arithmetic as the radius: the two never
    disagree about a claim. Radius 0 needs p > 1/2, the condition for a prediction.
    """
    if not (radius >= 0 and math.isfinite(radius)):
        raise ValueError(f"a radius must be finite and not negative, got {radius}")
    if not (sigma > 0 and math.isfinite(sigma)):
        raise ValueError(f"sigma must be positive and finite, got {sigma}")
    p = max(float(special.ndtr(radius / sigma)), 0.5)
    while p < 1 and not _within(radius, p_lower=p, sigma=sigma):
        p = math.nextafter(p, 1.0)
    while p < 1 and _within(radius, p_lower=(below := math.nextafter(p, 0.0)), sigma=sigma):
        p = below
    return p


def max_radius(*, sigma: float, n: int, alpha: float) -> float:
    """sigma * Phi^-1(alpha^(1/n)), rounded down: the radius of n unanimous draws, the maximum.

    0 when even unanimous draws leave the bound at or below 1/2.
    """
    p = clopper_pearson_lower(n, n, alpha)
    return radius_lower(p, sigma) if p > 0.5 else 0.0


def max_randomized_radius(*, sigma: float, n: int, alpha: float) -> float:
    """The same for the randomised bound, at the smallest u that is used."""
    p = randomized_lower(n, n, alpha, uniform=LEAST_UNIFORM)
    return radius_lower(p, sigma) if p > 0.5 else 0.0


def draws_needed(p: float, alpha: float) -> int:
    """The fewest unanimous draws that bound a probability by at least p: alpha^(1/n) >= p."""
    if not 0 < p < 1:
        raise ValueError(f"p must be in (0, 1), got {p}")
    n = max(1, math.ceil(math.log(alpha) / math.log(p)))
    while clopper_pearson_lower(n, n, alpha) < p:
        n += 1
    while n > 1 and clopper_pearson_lower(n - 1, n - 1, alpha) >= p:
        n -= 1
    return n


def _within(radius: float, *, p_lower: float, sigma: float) -> bool:
    """Whether Phi(radius / sigma) <= p_lower, decided beyond float64."""
    with localcontext() as context:
        context.prec = DIGITS
        return _normal_cdf(Decimal(radius) / Decimal(sigma)) + GUARD <= Decimal(p_lower)


def _normal_cdf(x: Decimal) -> Decimal:
    """Phi(x) = 1/2 + phi(x) * sum_j x^(2j+1) / (1*3*...*(2j+1)) for x >= 0 (Marsaglia 2004).

    All terms are positive, so nothing cancels, and the sum is accurate to nearly all digits of the
    context.
    """
    term = total = x
    odd = 1
    while term > total * Decimal(10) ** -DIGITS:
        odd += 2
        term = term * x * x / odd
        total += term
    density = (-x * x / 2).exp() / (2 * PI).sqrt()
    return Decimal("0.5") + density * total
