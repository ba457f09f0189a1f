"""What a recipe may ask for: closed forms against the exact bounds."""

import math

import pytest

from components.certify.l2.bounds import max_radius, max_randomized_radius
from components.certify.l2.claims import check_radii
from components.certify.l2.radius import draws_to_certify, max_certifiable_radius
from components.certify.l2.sequential import SequentialPlan
from components.core.errors import CasemateError

METHODS = ["fixed", "randomized", "sequential"]


def exact(method, *, sigma, n, alpha):
    if method == "sequential":
        return SequentialPlan(
            sigma=sigma, radii=(), failure_prob=alpha, num_estimate=n
        ).max_certifiable_radius
    most = max_radius if method == "fixed" else max_randomized_radius
    return most(sigma=sigma, n=n, alpha=alpha)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("n", "alpha"), [(20, 0.01), (100, 0.001), (1000, 0.04), (100_000, 1e-3)])
def test_closed_forms_agree_with_the_exact_bounds(method, n, alpha):
    found = max_certifiable_radius(sigma=0.5, n=n, alpha=alpha, method=method)
    # exact bounds retreat by 1e-12 steps and stay 1e-9 below their barrier
    assert found == pytest.approx(exact(method, sigma=0.5, n=n, alpha=alpha), rel=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_too_few_draws_reach_nothing(method):
    assert max_certifiable_radius(sigma=0.5, n=3, alpha=0.001, method=method) == 0
    assert exact(method, sigma=0.5, n=60, alpha=0.001) > 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("radius", [0.1, 0.5, 1.2])
def test_the_named_number_of_draws_is_the_smallest(method, radius):
    setting = {"sigma": 0.5, "alpha": 0.001, "method": method}
    n = draws_to_certify(radius, **setting)
    assert (
        max_certifiable_radius(n=n, **setting)
        >= radius
        > max_certifiable_radius(n=n - 1, **setting)
    )
    assert draws_to_certify(9.0, **setting) is None


def test_the_randomised_bound_reaches_further_and_is_refused_beyond():
    setting = {"sigma": 0.5, "n": 100, "alpha": 0.001}
    plain, lucky = max_radius(**setting), max_randomized_radius(**setting)
    assert plain < lucky
    check_radii([lucky], **setting, randomized=True)
    with pytest.raises(CasemateError, match="is above"):
        check_radii([math.nextafter(lucky, 1)], **setting, randomized=True)
    with pytest.raises(CasemateError, match="is above"):
        check_radii([lucky], **setting)
