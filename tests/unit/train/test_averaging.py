"""Averages of weights against sums by hand; which weights are selected."""

import pytest
import torch
from torch import nn

from components.core.errors import CasemateError
from components.train.averaging import WeightAverage, weight_average
from components.train.selection import Selection
from components.train.session import initial_model
from components.train.settings import EmaSettings, SwaSettings, TrainSettings


def bias_at(model, value: float) -> None:
    with torch.no_grad():
        model.net.head.bias.fill_(value)


def averaged_bias(average: WeightAverage) -> float:
    return average.model.net.head.bias[0].item()


def test_an_exponential_average_by_hand(toy_spec):
    model = initial_model(toy_spec, seed=0)
    average = weight_average(model, EmaSettings(decay=0.75))
    assert average.model is None  # nothing was averaged: the model itself is evaluated
    for value in (1.0, 2.0, 4.0):
        bias_at(model, value)
        average.after_step(model)
        average.after_epoch(model, 0)  # changes no weight
    first = 1.0
    second = 0.75 * first + 0.25 * 2.0
    assert averaged_bias(average) == pytest.approx(0.75 * second + 0.25 * 4.0)
    assert model.net.head.bias[0].item() == 4.0


def test_a_plain_average_over_late_epochs(toy_spec):
    model = initial_model(toy_spec, seed=0)
    average = weight_average(model, SwaSettings(start_epoch=1))
    for epoch, value in enumerate((100.0, 1.0, 2.0, 6.0)):
        bias_at(model, value)
        average.after_step(model)  # steps do not count
        average.after_epoch(model, epoch)
        assert (average.model is None) == (epoch == 0)
    assert averaged_bias(average) == pytest.approx(3.0)


def test_statistics_of_batch_normalisation_are_copied(toy_spec):
    model = initial_model(toy_spec, seed=0)
    model.net.extra = nn.BatchNorm1d(2)
    average = weight_average(model, EmaSettings(decay=0.9))
    for value in (1.0, 3.0):
        model.net.extra.running_mean.fill_(value)
        average.after_step(model)
    assert average.model.net.extra.running_mean.tolist() == [3.0, 3.0]
    with pytest.raises(CasemateError, match="does not fit batch normalisation; use ema"):
        weight_average(model, SwaSettings())


def test_the_first_of_equally_good_epochs_is_kept():
    model, selection = nn.Linear(1, 1), Selection(TrainSettings(select="best", patience=2))
    given_up = []
    for epoch, value in enumerate((0.3, 0.5, 0.5, 0.4)):
        with torch.no_grad():
            model.weight.fill_(epoch)
        selection.consider(value, epoch, model)
        given_up.append(selection.given_up(epoch))
    assert (selection.best_epoch, selection.best_value) == (1, 0.5)
    assert selection.best_weights["weight"].item() == 1.0
    assert given_up == [False, False, False, True]


def test_without_a_choice_nothing_is_kept():
    selection = Selection(TrainSettings())
    assert not selection.is_on
    assert Selection(TrainSettings(patience=3)).is_on
    selection.consider(0.5, 0, nn.Linear(1, 1))
    assert selection.best_weights is None
    assert not selection.given_up(100)
