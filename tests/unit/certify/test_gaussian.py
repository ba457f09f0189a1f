"""CERTIFY and PREDICT from counts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from components.certify.bounds import max_radius
from components.certify.gaussian import certify_counts, check_can_certify, predict_counts
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


@pytest.mark.parametrize(
    ("top", "other", "p_value"),
    [
        (60, 40, 0.0568879336),
        (66, 34, 0.0017899304),
        (67, 33, 0.0008737198),
        (10, 0, 0.001953125),
        (11, 0, 0.0009765625),
    ],
)
def test_published_prediction_p_values(top, other, p_value):
    # 1e-10: the values are printed with ten decimals
    assert predict_counts(counts(other, top), alpha=p_value + 1e-10) == 1
    assert predict_counts(counts(other, top), alpha=p_value - 1e-10) == -1


@pytest.mark.parametrize(
    ("n", "smallest"), [(20, 18), (100, 67), (1000, 553), (10000, 5166), (100000, 50521)]
)
def test_smallest_top_count_that_predicts(n, smallest):
    assert predict_counts(counts(n - smallest, smallest), alpha=0.001) == 1
    assert predict_counts(counts(n - smallest + 1, smallest - 1), alpha=0.001) == -1


def test_prediction_compares_the_two_leaders_only():
    assert predict_counts(counts(40, 0, 11), alpha=0.001) == 0
    assert predict_counts(counts(5, 5), alpha=0.9) == -1  # a tie is never significant


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
    with pytest.raises(ValueError, match="at least"):
        predict_counts(counts(0, 0), alpha=0.1)
