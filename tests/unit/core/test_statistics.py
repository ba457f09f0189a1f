"""Accuracy with its exact interval."""

from fractions import Fraction
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.core.statistics import accuracy, clopper_pearson_interval


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
