"""The confidence sequence: holds at all times at once, and contains the interval of one look."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.core.confidence_sequences import BAND, ShareSoFar, anytime_interval
from components.core.statistics import clopper_pearson_interval


@pytest.mark.parametrize("share", [0.03, 0.5, 0.9])
def test_a_stream_that_is_looked_at_all_the_time_stays_inside(share):
    """400 streams; Clopper & Pearson's interval, looked at as often, loses far more of them."""
    rng, times = np.random.default_rng(2), range(4, 201, 4)
    missed = missed_fixed = 0
    for held in np.cumsum(rng.random((400, 200)) < share, axis=1):
        looks = [(int(held[t - 1]), t) for t in times]
        missed += any(not _inside(share, anytime_interval(k, t, BAND)) for k, t in looks)
        missed_fixed += any(not _inside(share, clopper_pearson_interval(k, t)) for k, t in looks)
    assert missed <= 35  # 99.9% quantile of Bin(400, 0.05)
    assert missed_fixed > 35


@given(st.integers(1, 3000).flatmap(lambda t: st.tuples(st.integers(0, t), st.just(t))))
def test_it_contains_the_exact_interval_of_one_look(state):
    k, t = state
    low, high = anytime_interval(k, t, BAND)
    exact_low, exact_high = clopper_pearson_interval(k, t)  # 95%, too
    assert low <= exact_low
    assert exact_high <= high


def test_what_is_decided_narrows_the_band_to_the_final_share():
    early = ShareSoFar(held=8, seen=10, total=100, least=8, most=98)
    low, high = early.band()
    assert low <= early.value == 0.8 <= high
    assert (low, high) == (anytime_interval(8, 10, BAND)[0], 0.98)  # two of 100 are lost already
    late = ShareSoFar(held=80, seen=100, total=100, least=80, most=80)
    assert late.band() == (0.8, 0.8)


def _inside(share, band):
    return band[0] <= share <= band[1]
