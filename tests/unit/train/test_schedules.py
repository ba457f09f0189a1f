"""Learning rate and epsilon at their boundaries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.train.schedules import epsilon_at, learning_rate_at


def test_learning_rate_rises_falls_and_rests():
    def at(step: int) -> float:
        return learning_rate_at(step, peak=2.0, total_steps=12, warmup_steps=4, floor_ratio=0.1)

    assert [at(step) for step in range(4)] == [0.5, 1.0, 1.5, 2.0]
    assert at(4) == 2.0  # the cosine begins at its top
    assert at(8) == pytest.approx(2.0 * (0.1 + 0.9 / 2))  # half way down
    assert at(12) == pytest.approx(0.2)
    assert at(40) == at(12)  # a longer run than planned rests on the floor


@given(st.integers(0, 5), st.integers(1, 40))
def test_learning_rate_never_exceeds_its_peak_nor_falls_below_the_floor(warmup, total):
    rates = [
        learning_rate_at(step, peak=1e-3, total_steps=total, warmup_steps=warmup)
        for step in range(total)
    ]
    assert all(0 < rate <= 1e-3 for rate in rates)
    falling = rates[warmup:]
    assert falling == sorted(falling, reverse=True)
    assert all(rate >= 1e-5 * 0.999999 for rate in falling)


def test_no_warmup_starts_at_the_peak():
    assert learning_rate_at(0, peak=3.0, total_steps=10, warmup_steps=0) == 3.0


def test_warmup_of_the_whole_run_divides_by_nothing():
    assert learning_rate_at(4, peak=1.0, total_steps=4, warmup_steps=4) == 1.0


def test_epsilon_warms_up_by_whole_epochs():
    warming = [epsilon_at(epoch, final=0.4, warmup_epochs=4) for epoch in range(6)]
    assert warming == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.4])
    assert warming[0] == 0  # exactly: the first epoch is clean
    assert warming[4] == 0.4
    assert epsilon_at(0, final=0.4, warmup_epochs=0) == 0.4
