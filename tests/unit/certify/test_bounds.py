"""Binomial bounds and radii against published values and exact arithmetic."""

import math
from fractions import Fraction
from math import comb

import mpmath  # arrives with torch, through sympy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from components.certify.l2.bounds import (
    clopper_pearson_lower,
    draws_needed,
    max_radius,
    probability_needed,
    radius_lower,
    randomized_lower,
)

ALPHA = 0.001


@pytest.mark.parametrize(
    ("k", "n", "p_lower", "radius"),
    [
        (100, 100, 0.9332543008, 0.7502375),
        (99, 100, 0.9113731113, 0.6746295),
        (95, 100, 0.8446326942, 0.5068409),
        (60, 100, 0.4409842652, None),
        (990, 1000, 0.9760361872, 0.9890048),
        (9000, 10000, 0.8904097337, 0.6143550),
        (9999, 10000, 0.9990770387, 1.5569818),
        (90000, 100000, 0.8970364962, 0.6324223),
        (99999, 100000, 0.9999076697, 1.8695633),
        (100000, 100000, 0.9999309248, 1.9057283),
    ],
)
def test_published_bounds_and_radii(k, n, p_lower, radius):
    found = clopper_pearson_lower(k, n, ALPHA)
    assert found == pytest.approx(p_lower, abs=6e-11)  # printed with 10 decimals
    if radius is None:
        assert found <= 0.5
    else:
        assert radius_lower(found, 0.5) == pytest.approx(radius, abs=6e-8)  # 7 decimals


@pytest.mark.parametrize(("k", "n"), [(66, 100), (550, 1000), (5156, 10000), (50490, 100000)])
def test_smallest_count_that_does_not_abstain(k, n):
    assert clopper_pearson_lower(k - 1, n, ALPHA) <= 0.5 < clopper_pearson_lower(k, n, ALPHA)


@pytest.mark.parametrize(
    ("n", "smallest"),
    [(1000, (737, 877, 991)), (10000, (7058, 8526, 9818)), (100000, (69598, 84492, 97870))],
)
def test_smallest_count_that_reaches_a_radius(n, smallest):
    for k, eps in zip(smallest, (0.25, 0.5, 1.0), strict=True):
        below, at = (radius_lower(clopper_pearson_lower(j, n, ALPHA), 0.5) for j in (k - 1, k))
        assert below < eps <= at


@settings(deadline=None)
@given(
    st.integers(1, 60).flatmap(lambda n: st.tuples(st.integers(1, n), st.just(n))),
    st.sampled_from([0.3, 0.05, 0.001, 1e-6]),
)
def test_bound_keeps_its_definition_in_exact_arithmetic(case, alpha):
    k, n = case
    p = Fraction(clopper_pearson_lower(k, n, alpha))
    tail = sum(comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k, n + 1))
    assert tail <= Fraction(alpha)
    assert tail >= Fraction(alpha) * (1 - Fraction(1, 10**4))  # and the bound is not thrown away


def exact_tail(k, n, p):
    """P(Bin(n, p) >= k) with 40 digits, term by term."""
    p = mpmath.mpf(p)
    log_choose = mpmath.loggamma(n + 1) - mpmath.loggamma(k + 1) - mpmath.loggamma(n - k + 1)
    term = mpmath.exp(log_choose + k * mpmath.log(p) + (n - k) * mpmath.log1p(-p))
    total = term
    for j in range(k, n):
        term *= (n - j) * p / ((j + 1) * (1 - p))
        total += term
        if term < total * mpmath.mpf("1e-30"):
            break
    return total


@pytest.mark.parametrize(
    ("k", "n", "alpha"),
    [  # the library's own quantile of each is a bit too high
        *((50, 50, 1e-6), (900, 1000, 0.01), (581, 1000, 0.0009)),
        *((64984, 100_000, 1e-4), (86507, 100_000, ALPHA), (867805, 1_000_000, 0.0009)),
    ],
)
def test_no_bound_is_lifted_by_the_rounding_of_a_tail(k, n, alpha):
    p = clopper_pearson_lower(k, n, alpha)
    with mpmath.workdps(40):
        assert exact_tail(k, n, p) <= mpmath.mpf(alpha) < exact_tail(k, n, p + 1e-11)


@pytest.mark.parametrize("n", [100, 1000, 100000])
def test_bound_keeps_its_definition_in_float64(n):
    for k in range(1, n + 1, max(1, n // 300)):
        assert special.betainc(k, n - k + 1, clopper_pearson_lower(k, n, ALPHA)) <= ALPHA


def test_no_success_bounds_nothing():
    assert clopper_pearson_lower(0, 100, ALPHA) == 0.0


@settings(deadline=None)
@given(
    st.floats(0.5, 1.0, exclude_min=True, exclude_max=True),
    st.sampled_from([0.12, 0.25, 0.5, 1.0, 1 / 3]),
)
def test_radius_is_the_last_float_below_the_truth(p, sigma):
    with mpmath.workdps(60):
        # sqrt(2) erfinv(2p - 1) = Phi^-1(p): another route than the series in use
        truth = mpmath.mpf(sigma) * mpmath.sqrt(2) * mpmath.erfinv(2 * mpmath.mpf(p) - 1)
        radius = radius_lower(p, sigma)
        assert mpmath.mpf(radius) <= truth < mpmath.mpf(math.nextafter(radius, math.inf))


@pytest.mark.parametrize(("n", "factor"), [(1000, 2.4633), (10000, 3.1986), (100000, 3.8115)])
def test_largest_possible_radius(n, factor):
    assert max_radius(sigma=1.0, n=n, alpha=ALPHA) == pytest.approx(factor, abs=6e-5)
    assert max_radius(sigma=0.25, n=n, alpha=ALPHA) == pytest.approx(0.25 * factor, abs=2e-5)


def test_too_few_draws_have_no_radius():
    assert max_radius(sigma=0.5, n=9, alpha=ALPHA) == 0.0
    assert max_radius(sigma=0.5, n=10, alpha=ALPHA) > 0.0


@pytest.mark.parametrize(("k", "n", "alpha"), [(-1, 5, 0.1), (6, 5, 0.1), (0, 0, 0.1), (1, 5, 0.0)])
def test_impossible_counts_are_refused(k, n, alpha):
    with pytest.raises(ValueError, match=r"need|alpha"):
        clopper_pearson_lower(k, n, alpha)


@pytest.mark.parametrize(("p", "sigma"), [(0.4, 0.5), (1.0, 0.5), (0.9, 0.0), (0.9, math.inf)])
def test_impossible_radii_are_refused(p, sigma):
    with pytest.raises(ValueError, match=r"radius|sigma"):
        radius_lower(p, sigma)


@settings(deadline=None)
@given(st.floats(0, 4.0), st.sampled_from([0.12, 0.25, 0.5, 1.0, 1 / 3]))
def test_needed_probability_and_radius_never_disagree(radius, sigma):
    p = probability_needed(radius, sigma)
    if p == 1:
        assert radius / sigma > 8
        return
    assert p > 0.5
    assert radius_lower(p, sigma) >= radius
    below = math.nextafter(p, 0.0)
    assert below == 0.5 or radius_lower(below, sigma) < radius
    with mpmath.workdps(60):
        truth = mpmath.ncdf(mpmath.mpf(radius) / mpmath.mpf(sigma))
        assert truth <= mpmath.mpf(p)
        assert mpmath.mpf(below) < truth + mpmath.mpf("1e-38")


def test_needed_probability_at_the_ends():
    assert probability_needed(0.0, 0.5) == math.nextafter(0.5, 1)  # an answer needs more than half
    assert probability_needed(1e6, 0.5) == 1.0  # no bound reaches it
    for radius, sigma in [(-0.1, 0.5), (math.inf, 0.5), (0.5, 0.0)]:
        with pytest.raises(ValueError, match=r"radius|sigma"):
            probability_needed(radius, sigma)


@pytest.mark.parametrize("p", [0.5000001, 0.9, 0.999, 0.99993])
def test_fewest_unanimous_draws(p):
    n = draws_needed(p, ALPHA)
    below = clopper_pearson_lower(n - 1, n - 1, ALPHA)
    assert below < p <= clopper_pearson_lower(n, n, ALPHA)


@settings(deadline=None)
@given(
    st.integers(1, 60).flatmap(lambda n: st.tuples(st.integers(1, n), st.just(n))),
    st.sampled_from([0.04, 0.001]),
    st.floats(0, 1, exclude_max=True),
)
def test_randomised_bound_solves_its_equation_in_exact_arithmetic(case, alpha, uniform):
    k, n = case
    bound = randomized_lower(k, n, alpha, uniform=uniform)
    p, u = Fraction(bound), Fraction(max(uniform, 0.05))
    mass = [comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k, n + 1)]
    failure = sum(mass[1:]) + u * mass[0]
    assert failure == pytest.approx(alpha, rel=1e-4)
    assert failure <= Fraction(alpha)
    assert bound >= clopper_pearson_lower(k, n, alpha)


@pytest.mark.parametrize(("n", "gain"), [(100, 0.0386), (10**5, 0.0195)])
def test_mean_gain_of_the_randomised_bound(n, gain):
    # Unanimous draws: u p^n = alpha. Raising u to 0.05 costs a tenth of the gain, 0.043 and 0.022.
    plain = radius_lower(clopper_pearson_lower(n, n, ALPHA), 0.5)
    numbers = [(i + 0.5) / 100 for i in range(100)]
    found = [0.5 * special.ndtri(randomized_lower(n, n, ALPHA, uniform=u)) for u in numbers]
    assert math.fsum(found) / 100 - plain == pytest.approx(gain, abs=6e-5)
    exact = [0.5 * special.ndtri((ALPHA / max(u, 0.05)) ** (1 / n)) for u in numbers]
    assert found == pytest.approx(exact, abs=1e-9)


def test_randomised_bound_fails_as_often_as_it_says():
    # Exact over k, a fine grid over u: P(q <= bound) is alpha, less what u >= 0.05 gives away.
    n, q, alpha, grid = 30, 0.7, 0.04, 50
    failed = 0.0
    for k in range(n + 1):
        mass = comb(n, k) * q**k * (1 - q) ** (n - k)
        if clopper_pearson_lower(min(k + 1, n), n, alpha) < q and k < n:
            continue  # no u brings the bound up to q
        hits = sum(
            randomized_lower(k, n, alpha, uniform=(i + 0.5) / grid) >= q for i in range(grid)
        )
        failed += mass * hits / grid
    assert 0.9 * alpha < failed <= alpha + 1 / grid * 0.15  # no count has a probability above 0.15


def test_randomised_bound_refuses_wrong_calls():
    assert randomized_lower(0, 10, ALPHA, uniform=0.5) == 0.0
    with pytest.raises(ValueError, match="u must"):
        randomized_lower(5, 10, ALPHA, uniform=1.0)
    with pytest.raises(ValueError, match=r"alpha < 0\.05"):
        randomized_lower(5, 10, 0.05, uniform=0.5)
