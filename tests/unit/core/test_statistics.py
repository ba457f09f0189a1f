"""Accuracy with its intervals, and the paired test."""

from fractions import Fraction
from itertools import product
from math import comb, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from components.core.statistics import (
    accuracy,
    clopper_pearson_interval,
    holm,
    mcnemar_p_value,
    mean_interval,
    paired_mean_difference,
    wilson_interval,
)


def upper_tail(k, n, p):
    """P(Bin(n, p) >= k) in exact arithmetic."""
    p = Fraction(p)
    return sum(comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k, n + 1))


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_interval_leaves_two_and_a_half_percent_in_each_tail(case):
    k, n = case
    low, high = clopper_pearson_interval(k, n)
    assert low <= k / n <= high
    if k > 0:
        assert float(upper_tail(k, n, low)) == pytest.approx(0.025, rel=1e-9)
    if k < n:
        assert float(1 - upper_tail(k + 1, n, high)) == pytest.approx(0.025, rel=1e-9)


def test_known_values():
    assert clopper_pearson_interval(0, 10) == (0.0, pytest.approx(1 - 0.025**0.1))
    assert clopper_pearson_interval(10, 10) == (pytest.approx(0.025**0.1), 1.0)
    result = accuracy(np.array([True, False, True, True]))
    assert result["value"] == 0.75
    assert result["num_items"] == 4


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros(0, dtype=bool),
        np.array([1, 2, 3]),  # a running total
        np.array([[True, False]]),
    ],
)
def test_anything_but_one_verdict_per_item_is_refused(wrong):
    with pytest.raises(ValueError, match=r"no items|expected"):
        accuracy(wrong)


@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_ends_are_the_shares_that_the_score_test_just_accepts(case):
    k, n = case
    low, high = wilson_interval(k, n)
    assert 0 <= low <= k / n <= high <= 1
    for end in (low, high):
        z = 1.959963984540054  # of the standard normal, 97.5 %
        if 0 < end < 1:
            assert abs(k / n - end) == pytest.approx(z * sqrt(end * (1 - end) / n), rel=1e-9)


def test_wilson_at_known_values():
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)  # Newcombe 1998
    assert wilson_interval(0, 20) == (0.0, pytest.approx(0.1611, abs=5e-5))
    assert wilson_interval(20, 20) == (pytest.approx(0.8389, abs=5e-5), 1.0)
    with pytest.raises(ValueError, match="k <= n"):
        wilson_interval(3, 2)


def test_mcnemar_counts_outcomes_of_fair_coins_that_are_as_uneven():
    for won, lost in product(range(7), range(7)):
        n = won + lost
        extreme = sum(
            comb(n, heads) for heads in range(n + 1) if abs(2 * heads - n) >= abs(won - lost)
        )
        one = np.array([True] * won + [False] * lost + [True, True, False])
        two = np.array([False] * won + [True] * lost + [True, True, False])
        assert mcnemar_p_value(one, two) == pytest.approx(extreme / 2**n)
        assert mcnemar_p_value(two, one) == mcnemar_p_value(one, two)


def test_mcnemar_needs_verdicts_of_the_same_items():
    with pytest.raises(ValueError, match="two equal"):
        mcnemar_p_value(np.array([True]), np.array([True, False]))
    with pytest.raises(ValueError, match="at least one"):
        mcnemar_p_value(np.zeros(0, bool), np.zeros(0, bool))


def test_the_interval_of_a_mean_counts_dependent_verdicts_once():
    """Variants that all agree are one verdict per item; independent ones are many."""
    rng = np.random.default_rng(0)
    one = rng.random(200) < 0.7
    assert mean_interval(one.astype(float))[0] == pytest.approx(
        wilson_interval(int(one.sum()), 200)[0], abs=2e-3
    )
    many = (rng.random((200, 95)) < 0.7).mean(axis=1)
    low, high = mean_interval(many)
    expected = wilson_interval(round(many.sum() * 95), 200 * 95)
    assert high - low == pytest.approx(expected[1] - expected[0], rel=0.3)
    assert mean_interval(np.ones(5)) == wilson_interval(5, 5)
    assert mean_interval(np.zeros(5)) == wilson_interval(0, 5)
    for wrong in (np.array([]), np.array([1.5]), np.ones((2, 2))):
        with pytest.raises(ValueError, match="shares in"):
            mean_interval(wrong)


def test_the_interval_of_a_mean_covers_it():
    """Items of different difficulty, 20 variants each: about 95 of 100 intervals hold the mean."""
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(400):
        difficulty = rng.beta(0.8, 0.4, 150)  # mean 2/3
        low, high = mean_interval(rng.binomial(20, difficulty) / 20)
        held += low <= 2 / 3 <= high
    assert 0.92 <= held / 400 <= 0.98


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_rejects_what_its_steps_reject(p_values):
    """The definition: rejected in rising order, until one is not below limit / (tests left)."""
    adjusted = holm(p_values)
    assert len(adjusted) == len(p_values)
    for limit in (0.01, 0.05, 0.3):
        order = sorted(range(len(p_values)), key=lambda i: p_values[i])
        rejected = set()
        for rank, place in enumerate(order):
            if p_values[place] * (len(order) - rank) >= limit:
                break
            rejected.add(place)
        assert {i for i, p in enumerate(adjusted) if p < limit} == rejected


def test_holm_example():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []


def test_means_of_variants_have_students_interval():
    random = np.random.default_rng(0)
    one, other = random.integers(0, 6, (2, 50)) / 5
    gap, p_value = paired_mean_difference(one, other)
    oracle = stats.ttest_rel(one, other)
    assert p_value == pytest.approx(oracle.pvalue)
    interval = oracle.confidence_interval()
    assert (gap["low"], gap["high"]) == pytest.approx((interval.low, interval.high))
    assert gap["value"] == pytest.approx((one - other).mean())
    assert paired_mean_difference(one, one)[1] == 1
    assert paired_mean_difference(np.ones(4), np.zeros(4))[1] == 1 / 8  # all four signs flipped
    assert paired_mean_difference(np.ones(1), np.zeros(1)) == (
        {"value": 1, "low": -1, "high": 1}, 1
    )  # fmt: skip
