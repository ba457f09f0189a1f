"""Validation attacks: full epsilon, honest counting, and which of them is the stronger."""

from dataclasses import replace

import pytest
import torch

from components.train.feed import Worker
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
    Workers,
    robust_accuracy,
    validation_attack,
    validation_score,
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


def test_workers_share_the_batches_and_find_the_same_figure(toy_spec, val_split, monkeypatch):
    monkeypatch.setattr("components.train.validation.BATCH", 3)  # four batches of ten items
    model = initial_model(toy_spec, seed=0)
    objective = make_objective(StandardSettings(), label_smoothing=0.0)
    scores = torch.rand(10, generator=torch.Generator().manual_seed(0))
    rows = {name: row for row, name in enumerate(val_split.item_ids)}
    objective.validation_scores = lambda bare, batch: scores[[rows[n] for n in batch.item_ids]]
    attack = ValidationAttack(0.1, 2, "pgd")

    def figures(workers: Workers) -> tuple[float, float]:
        score = validation_score(model, val_split, objective, seed=0, workers=workers)
        return score, robust_accuracy(model, val_split, attack, seed=0, workers=workers)

    alone = figures(Workers())
    assert alone[0] == pytest.approx(float(scores.double().mean()), abs=1e-12)
    for world in (2, 3, 5):  # with 5 one has nothing to do
        kept: list[list[torch.Tensor]] = []
        for rank in range(world):
            found: list[torch.Tensor] = []
            figures(Workers(Worker(rank, world), lambda own, found=found: found.append(own) or own))
            kept.append(found)
        sums = iter([sum(parts) for parts in zip(*kept, strict=True)])
        assert figures(Workers(Worker(0, world), lambda own, sums=sums: next(sums))) == alone


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
