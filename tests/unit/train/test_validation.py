"""Validation attacks: full epsilon, honest counting, and which of them is the stronger."""

from dataclasses import replace

import pytest
import torch

from components.core.errors import CasemateError
from components.train.objectives.adversarial import AdversarialTraining
from components.train.objectives.inner import InnerAttack
from components.train.objectives.trades import Trades
from components.train.session import initial_model
from components.train.validation import TrainingAttack, ValidationAttack, robust_accuracy


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


@pytest.mark.parametrize("objective", [AdversarialTraining, Trades])
def test_the_training_attack_counts_items_that_were_right_before(linear, val_split, objective):
    margins = (val_split.pixels().mean(dim=(1, 2, 3)) - 0.5) * (2 * val_split.labels - 1)
    cut = float(margins.sort().values[4] + margins.sort().values[5]) / 2
    attack = TrainingAttack(objective(InnerAttack(eps=cut, num_steps=8, step_size=cut / 2)))
    assert robust_accuracy(linear, val_split, attack, seed=0) == 0.5
    wrong = replace(val_split, labels=1 - val_split.labels)  # an attack could only mend them
    assert robust_accuracy(linear, wrong, attack, seed=0) == 0


def test_unknown_attacks_are_refused():
    with pytest.raises(CasemateError, match="choose pgd or apgd-ce"):
        ValidationAttack(0.1, 1, "fgsm")
