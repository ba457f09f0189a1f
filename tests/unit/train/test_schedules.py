"""Learning rate and epsilon at their boundaries."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.core.errors import CasemateError
from components.train.schedules import RateSchedule, epsilon_at, learning_rate_at, peak_rate


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


def rates(schedule: RateSchedule, *, epochs: int, warmup_epochs: int = 0, steps: int = 2) -> list:
    return [
        schedule.at(
            step, peak=1.0, epochs=epochs, warmup_epochs=warmup_epochs, steps_per_epoch=steps
        )
        for step in range(epochs * steps)
    ]


@given(st.integers(1, 12), st.integers(0, 4), st.integers(1, 5), st.floats(1e-5, 10))
def test_the_default_schedule_is_the_plain_one(epochs, warmup, steps, peak):
    for step in range(epochs * steps):
        assert RateSchedule().at(
            step, peak=peak, epochs=epochs, warmup_epochs=warmup, steps_per_epoch=steps
        ) == learning_rate_at(
            step, peak=peak, total_steps=epochs * steps, warmup_steps=warmup * steps
        )


def test_a_cooldown_rests_on_the_floor():
    found = rates(RateSchedule(floor=0.25, cooldown_epochs=2), epochs=6)
    cosine = [0.25 + 0.75 * (1 + math.cos(math.pi * step / 8)) / 2 for step in range(8)]
    assert found == pytest.approx([*cosine, 0.25, 0.25, 0.25, 0.25])


def test_a_warmup_from_a_value_begins_there():
    found = rates(RateSchedule("constant", warmup_start=0.2), epochs=3, warmup_epochs=2)
    assert found == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_milestones_are_whole_epochs_from_the_start():
    schedule = RateSchedule("step", gamma=0.1, milestones=(2, 3))
    found = rates(schedule, epochs=4, warmup_epochs=1)
    assert found == pytest.approx([0.5, 1, 1, 1, 0.1, 0.1, 0.01, 0.01])


def test_rates_that_follow_the_batch():
    assert peak_rate(5e-4, batch_size=1024) == 5e-4
    assert peak_rate(5e-4, batch_size=1024, rule="linear") == pytest.approx(1e-3)
    assert peak_rate(2e-4, batch_size=1024, rule="sqrt") == pytest.approx(2e-4 * math.sqrt(2))
    with pytest.raises(CasemateError, match="choose absolute, linear or sqrt"):
        peak_rate(1.0, batch_size=1, rule="log")


def test_published_epsilons_of_a_linear_warmup():
    found = [epsilon_at(e, final=4 / 255, warmup_epochs=10) * 255 for e in (0, 1, 5, 9, 10)]
    assert found == pytest.approx([0, 0.4, 2, 3.6, 4])


def test_a_sine_rises_without_a_kink():
    def at(epoch: float) -> float:
        return epsilon_at(epoch, final=2.0, warmup_epochs=6, zero_epochs=2, shape="sine")

    assert at(1.9) == at(2) == 0
    assert at(3) == pytest.approx(1 - math.sqrt(0.5))
    assert at(4) == pytest.approx(1)  # half of it, half way
    assert at(6) == 2.0
    assert at(2.001) < 1e-5
    assert 2 - at(5.999) < 1e-5


@given(st.integers(1, 9), st.data(), st.sampled_from(["linear", "sine"]))
def test_epsilon_only_rises_and_never_jumps(warmup, data, shape):
    zero = data.draw(st.integers(0, warmup - 1))
    times = [step / 50 for step in range(50 * (warmup + 1))]
    found = [
        epsilon_at(t, final=1.0, warmup_epochs=warmup, zero_epochs=zero, shape=shape) for t in times
    ]
    assert found == sorted(found)
    assert max(b - a for a, b in pairwise(found)) < 0.04
    assert (found[0], found[-1]) == (0, 1)
