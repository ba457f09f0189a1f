"""Learning rate and epsilon at their boundaries."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.core.settings import SettingError
from components.train.schedules import epsilon_at, peak_rate
from components.train.settings import (
    ConstantSettings,
    CosineSettings,
    StepSettings,
    TrainSettings,
)


def rates(*, epochs: int, steps: int = 2, peak: float = 1.0, **settings) -> list[float]:
    """The learning rate of every step of a training."""
    train = TrainSettings(**{"learning_rate": peak, "warmup_epochs": 0, **settings})
    return [
        train.rate_at(epoch, step, epochs=epochs, steps_per_epoch=steps)
        for epoch in range(epochs)
        for step in range(steps)
    ]


def test_learning_rate_rises_falls_and_stays():
    found = rates(epochs=4, steps=4, peak=2.0, warmup_epochs=1, schedule=CosineSettings(floor=0.2))
    assert found[:4] == [0.5, 1.0, 1.5, 2.0]
    assert found[4] == 2.0  # the cosine begins at its top
    assert found[10] == pytest.approx(2.0 * (0.1 + 0.9 / 2))  # half way down
    train = TrainSettings(learning_rate=2.0, schedule=CosineSettings(floor=0.2))
    end, later = (train.rate_at(e, 0, epochs=4, steps_per_epoch=4) for e in (4, 10))
    assert end == later == pytest.approx(0.2)  # a longer run than planned stays at the floor


@given(st.integers(0, 5), st.integers(1, 40))
def test_learning_rate_never_exceeds_its_peak_nor_falls_below_the_floor(warmup, epochs):
    found = rates(epochs=epochs, steps=1, peak=1e-3, warmup_epochs=warmup)
    assert all(0 < rate <= 1e-3 for rate in found)
    falling = found[warmup:]
    assert falling == sorted(falling, reverse=True)
    assert all(rate >= 1e-5 * 0.999999 for rate in falling)


def test_no_warmup_starts_at_the_peak():
    assert rates(epochs=10, peak=3.0)[0] == 3.0


def test_warmup_of_the_whole_run_does_not_divide_by_zero():
    train = TrainSettings(learning_rate=1.0, warmup_epochs=4)
    assert train.rate_at(4, 0, epochs=4, steps_per_epoch=1) == 1.0


def test_epsilon_warms_up_by_whole_epochs():
    warming = [linear(epoch, final=0.4, warmup_epochs=4) for epoch in range(6)]
    assert warming == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.4])
    assert warming[0] == 0  # exactly: the first epoch is clean
    assert warming[4] == 0.4
    assert linear(0, final=0.4, warmup_epochs=0) == 0.4


def linear(epoch: float, *, final: float, warmup_epochs: int) -> float:
    return epsilon_at(
        epoch, final=final, warmup_epochs=warmup_epochs, zero_epochs=0, shape="linear"
    )


def test_a_cooldown_stays_at_the_floor():
    found = rates(epochs=6, schedule=CosineSettings(floor=0.25, cooldown_epochs=2))
    cosine = [0.25 + 0.75 * (1 + math.cos(math.pi * step / 8)) / 2 for step in range(8)]
    assert found == pytest.approx([*cosine, 0.25, 0.25, 0.25, 0.25])


def test_a_warmup_from_a_value_begins_there():
    found = rates(epochs=3, schedule=ConstantSettings(), warmup_start=0.2, warmup_epochs=2)
    assert found == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_milestones_are_whole_epochs_from_the_start():
    found = rates(epochs=4, schedule=StepSettings(gamma=0.1, milestones=(2, 3)), warmup_epochs=1)
    assert found == pytest.approx([0.5, 1, 1, 1, 0.1, 0.1, 0.01, 0.01])


@given(st.integers(1, 5), st.integers(1, 9))
def test_every_few_epochs_is_a_list_of_milestones(every, epochs):
    milestones = tuple(range(every, epochs, every)) or (99,)
    expected = rates(epochs=epochs, schedule=StepSettings(milestones=milestones))
    assert rates(epochs=epochs, schedule=StepSettings(every=every)) == expected


def test_rates_that_follow_the_batch():
    assert peak_rate(5e-4, batch_size=1024, rule="absolute") == 5e-4
    assert peak_rate(5e-4, batch_size=1024, rule="linear") == pytest.approx(1e-3)
    assert peak_rate(2e-4, batch_size=1024, rule="sqrt") == pytest.approx(2e-4 * math.sqrt(2))
    scaled = TrainSettings(learning_rate=5e-4, batch_size=1024, rate_rule="linear")
    assert scaled.peak_rate == pytest.approx(1e-3)
    with pytest.raises(SettingError, match="choose one of absolute, linear, sqrt"):
        TrainSettings(rate_rule="log")


def test_published_epsilons_of_a_linear_warmup():
    found = [linear(e, final=4 / 255, warmup_epochs=10) * 255 for e in (0, 1, 5, 9, 10)]
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
