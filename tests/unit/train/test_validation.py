"""Validation attacks: full epsilon, honest counting, and which of them is the stronger."""

from dataclasses import replace

import pytest
import torch

from components.train.objectives.base_settings import AwpSettings
from components.train.objectives.make import make_objective
from components.train.objectives.settings import (
    DenoiserTrainingSettings,
    FgsmTrainingSettings,
    StandardSettings,
    TradesSettings,
)
from components.train.objectives.trades import Trades
from components.train.session import initial_model
from components.train.settings import TrainSettings
from components.train.validation import (
    TrainingAttack,
    ValidationAttack,
    robust_accuracy,
    validation_attack,
)


@pytest.fixture
def linear(toy_spec):
    """Bright or dark by the mean pixel: an attack at eps moves it by eps at most, and exactly."""
    model = initial_model(toy_spec, seed=0)

    def forward(x, visible=None):
        margin = x.mean(dim=(1, 2, 3)) - 0.5
        return torch.stack([-margin, margin], dim=1) * 10

    model.forward = forward
    return model


@pytest.mark.parametrize("kind", ["pgd", "apgd-ce"])
def test_accuracy_under_attack_is_the_exact_one_of_a_linear_model(linear, val_split, kind):
    margins = (val_split.pixels().mean(dim=(1, 2, 3)) - 0.5) * (2 * val_split.labels - 1)
    cut = (margins.sort().values[4] + margins.sort().values[5]) / 2
    attack = ValidationAttack(float(cut), 20, kind)
    assert robust_accuracy(linear, val_split, attack, seed=0) == 0.5
    weak = ValidationAttack(float(margins.min()) * 0.99, 20, kind)
    assert robust_accuracy(linear, val_split, weak, seed=0) == 1


@pytest.mark.parametrize("kind", [FgsmTrainingSettings, TradesSettings])
def test_the_training_attack_counts_items_that_were_right_before(linear, val_split, kind):
    margins = (val_split.pixels().mean(dim=(1, 2, 3)) - 0.5) * (2 * val_split.labels - 1)
    cut = float(margins.sort().values[4] + margins.sort().values[5]) / 2
    settings = kind(eps=cut, num_steps=8, step_size=cut / 2)
    attack = TrainingAttack(make_objective(settings, label_smoothing=0.0))
    assert robust_accuracy(linear, val_split, attack, seed=0) == 0.5
    wrong = replace(val_split, labels=1 - val_split.labels)  # an attack could only mend them
    assert robust_accuracy(linear, wrong, attack, seed=0) == 0


def attack_of(objective=StandardSettings(), **train):  # noqa: B008 - frozen
    made = make_objective(objective, label_smoothing=0.0)
    return validation_attack(TrainSettings(**train), made)


def test_which_attack_validates():
    warming = TradesSettings(eps=0.1, eps_warmup_epochs=9, eps_per="step", awp=AwpSettings())
    assert attack_of() is None
    assert attack_of(val_eps=0.2, val_steps=3) == ValidationAttack(0.2, 3, "pgd")
    assert attack_of(warming, val_attack="apgd-ce") == ValidationAttack(0.1, 10, "apgd-ce")
    made = make_objective(warming, label_smoothing=0.0)
    train = TrainSettings(objective=warming, val_attack="train", val_eps=0.3)
    own = validation_attack(train, made).objective
    assert isinstance(own, Trades)  # attacks need no wrapper
    assert (own.eps_at(0), own.settings.eps_per) == (0.3, "epoch")  # at once, also within an epoch
    assert attack_of(DenoiserTrainingSettings(full=True), val_eps=0.1) is None  # no classes
