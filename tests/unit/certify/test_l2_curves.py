"""Curves of certified accuracy, their envelope, and the figures beside them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from components.certify.l2.curves import (
    average_certified_radius,
    bound_distribution,
    certified_curve,
    envelope,
    num_possible_failures,
)

items = st.lists(st.tuples(st.booleans(), st.floats(0, 3)), min_size=1, max_size=30)


@settings(max_examples=30)
@given(items)
def test_a_curve_counts_right_items_that_reach_the_radius(rows):
    correct, radius = (np.array(column) for column in zip(*rows, strict=True))
    at = [0.0, *sorted({r for _, r in rows}), 3.1]
    curve = certified_curve(correct, radius, sigma=0.5, radii=at)
    for r, value, low, high in zip(at, curve.values, curve.low, curve.high, strict=True):
        assert value == sum(ok and reach >= r for ok, reach in rows) / len(rows)
        assert low <= value <= high
    assert curve.values[0] == correct.mean()
    assert (np.diff(curve.values) <= 0).all()


@settings(max_examples=30)
@given(items)
def test_the_average_radius_is_the_area_below_the_curve(rows):
    correct, radius = (np.array(column) for column in zip(*rows, strict=True))
    ends = np.unique([0.0, *radius])
    curve = certified_curve(correct, radius, sigma=0.5, radii=ends)
    area = float((np.diff(ends) * curve.values[1:]).sum())  # constant between radii, left-open
    assert average_certified_radius(correct, radius) == pytest.approx(area, abs=1e-12)


def test_the_area_by_quadrature():
    correct, radius = np.array([True, True, False]), np.array([0.5, 1.5, 2.0])
    grid = np.linspace(0, 3, 30_001)
    values = certified_curve(correct, radius, sigma=1.0, radii=grid[::10]).values
    area = integrate.trapezoid(values, grid[::10])
    assert average_certified_radius(correct, radius) == pytest.approx(area, abs=1e-3)


def test_the_envelope_is_the_best_curve_at_each_radius():
    at = [0.0, 0.5, 1.0, 2.0]
    narrow = certified_curve(
        np.array([True] * 3 + [False]), [0.6, 0.6, 0.4, 0.0], sigma=0.25, radii=at
    )
    wide = certified_curve(
        np.array([True] * 2 + [False] * 2), [1.5, 0.9, 0.0, 0.0], sigma=1.0, radii=at
    )
    best = envelope([wide, narrow])
    assert best.values.tolist() == [0.75, 0.5, 0.25, 0.0]
    assert best.sigmas.tolist() == [0.25, 0.25, 1.0, 0.25]  # equals: the smallest
    assert best.num_items == 4


def test_curves_that_cannot_be_compared_have_no_envelope():
    one = certified_curve(np.array([True]), [0.5], sigma=0.5, radii=[0.0])
    more = certified_curve(np.array([True, True]), [0.5, 0.5], sigma=1.0, radii=[0.0])
    other = certified_curve(np.array([True]), [0.5], sigma=1.0, radii=[0.1])
    for curves in ([], [one, more], [one, other]):
        with pytest.raises(ValueError, match="envelope"):
            envelope(curves)


@settings(max_examples=30)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_the_distribution_holds_every_item_once(bounds):
    found = bound_distribution(bounds, num_bins=10)
    assert found.counts.sum() == found.num_items == len(bounds)
    for low, high, count in zip(found.edges, found.edges[1:], found.counts, strict=False):
        assert count == sum(low <= b < high or b == high == 1 for b in bounds)
    for level, value in found.quantiles.items():
        assert value in bounds
        assert np.mean(np.array(bounds) <= value) >= level - 1 / len(bounds)


@pytest.mark.parametrize(("num_items", "failures"), [(500, 4), (1000, 5), (10_000, 21)])
def test_published_numbers_of_possible_failures(num_items, failures):
    found = num_possible_failures(num_items=num_items, failure_prob=0.001)
    assert found == failures
    assert stats.binom.sf(found, num_items, 0.001) <= 0.001
    assert stats.binom.sf(found - 1, num_items, 0.001) > 0.001


@pytest.mark.parametrize(
    ("correct", "radius"),
    [
        (np.array([1, 0]), [0.5, 0.5]),
        (np.array([True]), [0.5, 0.5]),
        (np.array([True]), [float("nan")]),
        (np.array([True]), [-0.1]),
        (np.array([], dtype=bool), []),
    ],
)
def test_wrong_calls_are_refused(correct, radius):
    with pytest.raises(ValueError, match="need"):
        average_certified_radius(correct, radius)
    with pytest.raises(ValueError, match="need"):
        certified_curve(correct, radius, sigma=0.5, radii=[0.0])


def test_wrong_radii_and_bounds_are_refused():
    for radii in ([], [-1.0], [float("inf")]):
        with pytest.raises(ValueError, match="radii"):
            certified_curve(np.array([True]), [0.5], sigma=0.5, radii=radii)
    for bounds in ([], [1.5]):
        with pytest.raises(ValueError, match="bounds"):
            bound_distribution(bounds)
