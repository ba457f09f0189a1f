"""CERTIFY from counts, and what it refuses before a draw is made."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from components.certify.l2.bounds import max_radius
from components.certify.l2.claims import (
    certified_radius,
    certify_counts,
    check_can_certify,
    check_radii,
    check_randomized,
    registered_uniform,
)
from components.core.errors import CasemateError


def counts(*values):
    return np.array(values, dtype=np.int64)


def test_class_comes_from_the_first_draws_and_bound_from_the_others():
    claim = certify_counts(counts(2, 8), counts(1, 99), sigma=0.5, alpha=0.001)
    assert (claim.prediction, claim.abstain, claim.k) == (1, False, 99)
    assert (claim.n0, claim.n) == (10, 100)
    assert claim.radius == pytest.approx(0.6746295, abs=6e-8)


def test_a_class_chosen_wrongly_abstains():
    claim = certify_counts(counts(8, 2), counts(1, 99), sigma=0.5, alpha=0.001)
    assert (claim.prediction, claim.abstain, claim.k, claim.radius) == (-1, True, 1, 0.0)


def test_ties_of_selection_go_to_the_lowest_class():
    claim = certify_counts(counts(1, 5, 5), counts(0, 100, 0), sigma=0.5, alpha=0.001)
    assert claim.prediction == 1


@given(st.integers(0, 100), st.sampled_from([0.001, 0.05]))
def test_a_radius_is_claimed_exactly_when_the_bound_passes_one_half(k, alpha):
    claim = certify_counts(counts(0, 9), counts(100 - k, k), sigma=0.5, alpha=alpha)
    assert claim.abstain == (claim.p_lower <= 0.5) == (claim.radius == 0.0)
    assert claim.radius <= max_radius(sigma=0.5, n=100, alpha=alpha)


def test_claims_fail_no_more_often_than_promised():
    # The class has p = 0.55: a radius above Phi^-1(0.55) is a false claim.
    rng = np.random.default_rng(0)
    p, alpha, n = 0.55, 0.05, 60
    truth = stats.norm.ppf(p)
    false = 0
    for k in rng.binomial(n, p, size=4000):
        claim = certify_counts(counts(0, 1), counts(n - k, k), sigma=1.0, alpha=alpha)
        false += claim.radius > truth
    # 99.9% quantile of the number of failures if each had probability alpha
    assert false <= stats.binom.ppf(0.999, 4000, alpha)
    assert false > 0  # the test would notice a bound that never claims anything


def test_settings_that_can_never_certify_are_refused():
    check_can_certify(n=10, alpha=0.001)
    with pytest.raises(CasemateError, match="use 10 or more") as caught:
        check_can_certify(n=9, alpha=0.001)
    assert caught.value.key == "certify.num_estimate"
    with pytest.raises(CasemateError, match="failure_prob"):
        check_can_certify(n=100, alpha=1.5)


def test_wrong_calls_are_refused():
    with pytest.raises(ValueError, match="draws in both"):
        certify_counts(counts(0, 0), counts(1, 2), sigma=0.5, alpha=0.1)


@pytest.mark.parametrize(
    ("k", "n", "radius"),
    [
        (100, 100, 0.7502375),
        (99, 100, 0.6746295),
        (60, 100, 0.0),
        (0, 100, 0.0),
        (9000, 10000, 0.6143550),
        (100000, 100000, 1.9057283),
    ],
)
def test_published_radii(k, n, radius):
    found = certified_radius(k, n, sigma=0.5, failure_prob=0.001)
    assert found == pytest.approx(radius, abs=6e-8)  # printed with 7 decimals
    assert found == certified_radius(successes=k, draws=n, sigma=0.5, failure_prob=0.001)


@given(st.integers(0, 200), st.sampled_from([0.25, 0.5, 1.0]))
def test_the_radius_is_that_of_the_claim(k, sigma):
    claim = certify_counts(counts(0, 9), counts(200 - k, k), sigma=sigma, alpha=0.001)
    assert certified_radius(k, 200, sigma=sigma, failure_prob=0.001) == claim.radius


@pytest.mark.parametrize(
    ("sigma", "n", "radius"), [(0.5, 100, 0.76), (0.25, 1000, 1.0), (0.5, 10000, 1.6)]
)
def test_a_radius_out_of_reach_is_refused_with_the_draws_it_needs(sigma, n, radius):
    with pytest.raises(CasemateError, match="is above") as caught:
        check_radii([0.1, radius], sigma=sigma, n=n, alpha=0.001)
    assert (caught.value.key, caught.value.value) == ("certify.radii", radius)
    needed = int(re.search(r"num_estimate to (\d+)", caught.value.remedy)[1])
    check_radii([radius], sigma=sigma, n=needed, alpha=0.001)
    with pytest.raises(CasemateError):
        check_radii([radius], sigma=sigma, n=needed - 1, alpha=0.001)


def test_a_radius_that_no_number_of_draws_reaches_is_refused_at_once():
    with pytest.raises(CasemateError, match="no practical number"):
        check_radii([9.0], sigma=0.5, n=1000, alpha=0.001)


def test_the_randomised_claim_is_never_below_the_plain_one():
    for item in range(20):
        u = registered_uniform(run_seed=3, item_id=f"item-{item}")
        for k in (0, 30, 60, 99, 100):
            plain, randomised = (
                certify_counts(counts(0, 1), counts(100 - k, k), sigma=0.5, alpha=0.001, uniform=v)
                for v in (None, u)
            )
            assert plain.p_lower <= randomised.p_lower < 1
            assert (plain.k, plain.n) == (randomised.k, randomised.n)


def test_the_uniform_number_belongs_to_the_item():
    numbers = [registered_uniform(run_seed=0, item_id=f"i{i}") for i in range(400)]
    assert numbers == [registered_uniform(run_seed=0, item_id=f"i{i}") for i in range(400)]
    assert registered_uniform(run_seed=1, item_id="i0") != numbers[0]
    assert stats.kstest(numbers, "uniform").pvalue > 1e-3


def test_the_randomised_bound_refuses_a_failure_probability_it_cannot_honour():
    check_randomized(0.001)
    with pytest.raises(CasemateError, match="randomised"):
        check_randomized(0.05)
