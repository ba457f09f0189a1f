"""Shares as text: proven ones never above the exact share, measured ones to nearest."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.core.shares import interval_ends, percent, points, share_line, share_of, shown
from components.core.statistics import accuracy, exact_accuracy

counts = st.integers(1, 3000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@given(counts)
def test_proven_is_cut_off_and_measured_is_nearest_with_one_more_digit(case):
    held, num_items = case
    exact = Fraction(100 * held, num_items)
    proven = percent(held / num_items, num_items, "proven")
    measured = percent(held / num_items, num_items, "measured")
    assert Fraction(proven) <= exact < Fraction(proven) + Fraction(1, 10)
    assert abs(Fraction(measured) - exact) <= Fraction(1, 200) + Fraction(1, 10**12)
    assert len(measured.partition(".")[2]) == len(proven.partition(".")[2]) + 1
    assert percent(held / num_items, num_items, "attacked") == measured


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [(0.5331, 0.6599, ("53.3", "66.0")), (0.0, 1.0, ("0.0", "100.0"))],
)
def test_intervals_are_rounded_outwards(low, high, shown):
    assert interval_ends(low, high) == shown


def test_a_line_has_the_digits_of_the_page():
    line = share_line(5978 / 10_000, 0.588, 0.6075, num_items=10_000, kind="measured")
    assert line == "59.78 % 95% [58.8, 60.8] n=10000"
    assert share_line(5978 / 10_000, 0.588, 0.6075, num_items=10_000, kind="proven")[:6] == "59.7 %"
    assert points(-0.0123, -0.0251, 0.0004) == "-1.23 points [-2.6, +0.1]"


@given(counts)
def test_stored_shares_get_the_one_interval(case):
    """Files of attacks and certificates hold the exact interval."""
    held, num_items = case
    verdicts = np.arange(num_items) < held
    stored = exact_accuracy(verdicts)
    assert shown(stored) == share_of(held, num_items) == accuracy(verdicts)
    assert (shown(stored)["value"], shown(stored)["num_items"]) == (held / num_items, num_items)
