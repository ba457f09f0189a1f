"""Soft targets: the outer loss follows them, attacks and accuracy follow their argmax."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from timm.loss import BinaryCrossEntropy

from components.core.errors import CasemateError
from components.core.settings import SettingError
from components.data.augment import Mixing
from components.data.settings import AugmentSettings
from components.train.objectives import settings as s
from components.train.objectives.base import Batch
from components.train.objectives.make import make_objective
from components.train.objectives.standard import binary_cross_entropy
from components.train.session import initial_model

OBJECTIVES = {
    "standard": s.StandardSettings(),
    "fgsm": s.FgsmTrainingSettings(eps=0.1),
    "columns": s.ColumnsTrainingSettings(band=4),
    "noise": s.GaussianTrainingSettings(sigma=0.25),
}
new_objective = partial(make_objective, label_smoothing=0.0)


@pytest.fixture
def model(toy_spec):
    return initial_model(toy_spec, seed=0).train()


def with_targets(batch: Batch) -> Batch:
    share = torch.linspace(0, 1, len(batch.labels))
    return replace(batch, targets=torch.stack([share, 1 - share], dim=1))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_outer_loss_is_the_cross_entropy_of_the_targets(name, model, new_batch):
    settings = OBJECTIVES[name]
    batch = with_targets(new_batch())
    plain = new_objective(settings).loss(model, model, batch)
    expected = -(batch.targets * plain.logits.log_softmax(dim=1)).sum(dim=1).mean()
    torch.testing.assert_close(plain.loss.detach(), expected)
    smoothed = make_objective(settings, label_smoothing=0.3).loss(model, model, batch)
    assert torch.equal(smoothed.loss, plain.loss)  # targets come smoothed already
    hard = new_objective(settings).loss(model, model, new_batch())
    assert not torch.equal(hard.loss, plain.loss)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_one_hot_targets_are_labels(name, model, new_batch):
    settings = OBJECTIVES[name]
    one_hot = torch.nn.functional.one_hot(new_batch().labels, 2).float()
    soft = new_objective(settings).loss(model, model, replace(new_batch(), targets=one_hot))
    hard = new_objective(settings).loss(model, model, new_batch())
    torch.testing.assert_close(soft.loss, hard.loss)
    assert torch.equal(soft.logits, hard.logits)


def test_attacks_ascend_the_likeliest_class(model, new_batch):
    batch = with_targets(new_batch())
    hard = replace(new_batch(), labels=(batch.targets[:, 1] > 0.5).long())
    objective = new_objective(s.FgsmTrainingSettings(eps=0.1))
    seen = objective.loss(model, model, batch).logits
    assert torch.equal(seen, objective.loss(model, model, hard).logits)
    assert not torch.equal(seen, objective.loss(model, model, new_batch()).logits)


def test_mart_refuses_soft_labels(model, new_batch):
    with pytest.raises(CasemateError, match=r"train\.augment: mixing makes soft labels"):
        new_objective(s.MartSettings(eps=0.1)).loss(model, model, with_targets(new_batch()))


def test_a_tie_goes_to_the_lowest_class(new_batch):
    batch = replace(new_batch(slice(0, 2)), targets=torch.tensor([[0, 0.5, 0.5], [0.2, 0.2, 0.6]]))
    assert batch.hard_labels.tolist() == [1, 2]
    assert torch.equal(new_batch().hard_labels, new_batch().labels)


# -- binary cross-entropy


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_binary_loss_of_labels_is_that_of_timm(new_batch, smoothing):
    batch = replace(new_batch(slice(0, 4)), labels=torch.tensor([0, 1, 3, 4]))
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    ours = binary_cross_entropy(logits, batch, label_smoothing=smoothing)
    expected = BinaryCrossEntropy(smoothing=smoothing)(logits, batch.labels)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_mixed_classes_count_as_fully_present(new_batch, smoothing):
    batch = new_batch(slice(0, 8))
    labels = torch.arange(8) % 5
    logits = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
    for step in range(5):
        _, targets = Mixing(AugmentSettings(mixup=0.8, mix_mode="pair")).apply(
            batch.images,
            labels,
            num_classes=5,
            smoothing=smoothing,
            run_seed=0,
            epoch=0,
            step=step,
            item_ids=batch.item_ids,
        )
        mixed = replace(batch, labels=labels, targets=targets)
        one_hot = torch.nn.functional.one_hot(labels, 5)
        both = (one_hot | one_hot[[row ^ 1 for row in range(8)]]).float()
        assert (targets[both == 1] > smoothing / 5 + 1e-4).all()  # no vanishing part in this draw
        ours = binary_cross_entropy(logits, mixed, label_smoothing=smoothing)
        expected = BinaryCrossEntropy(smoothing=0.0)(logits, both)
        torch.testing.assert_close(ours, expected)


def test_standard_training_by_binary_loss(model, new_batch):
    out = new_objective(s.StandardSettings(criterion="bce")).loss(model, model, new_batch())
    assert torch.equal(out.loss, binary_cross_entropy(out.logits, new_batch(), label_smoothing=0))
    with pytest.raises(SettingError, match=r"criterion: mse is unknown"):
        s.StandardSettings(criterion="mse")
