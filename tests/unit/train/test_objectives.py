"""Objectives: they can be minimised, and their randomness belongs to items and steps."""

import pytest
import torch
import torch.nn.functional as F

from components.train.objectives.ablation import ColumnAblation
from components.train.objectives.adversarial import FgsmTraining
from components.train.objectives.noise import GaussianNoise
from components.train.objectives.standard import Standard
from components.train.session import initial_model

OBJECTIVES = {
    "standard": Standard(),
    "fgsm": FgsmTraining(0.05),
    "columns": ColumnAblation(4),
    "noise": GaussianNoise(0.25),
}


class Recorder(torch.nn.Module):
    """Stands where the gradient-synchronising wrapper stands; remembers what it was shown."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.calls: list[tuple[torch.Tensor, ...]] = []

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        self.calls.append(inputs)
        return self.model(*inputs)


def shown(objective, model, batch) -> tuple[torch.Tensor, ...]:
    wrapped = Recorder(model)
    objective.loss(wrapped, model, batch)
    (inputs,) = wrapped.calls  # one synchronised pass per step: a second would hang other workers
    return inputs


@pytest.fixture
def model(toy_spec):
    return initial_model(toy_spec, seed=0).train()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_learns_the_toy_problem(name, model, new_batch):
    objective = OBJECTIVES[name]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses = []
    for step in range(20):
        out = objective.loss(model, model, new_batch(step=step))
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        losses.append(out.loss.item())
    assert losses[-1] < losses[0] / 2
    assert out.logits.shape == (22, 2)
    assert not out.logits.requires_grad
    logits = objective.validation_logits(model, new_batch())
    assert (logits.argmax(dim=1) == new_batch().labels).float().mean() > 0.9


@pytest.mark.parametrize("name", OBJECTIVES)
def test_label_smoothing_reaches_the_loss(name, model, new_batch):
    fields = {"fgsm": {"eps": 0.05}, "columns": {"band": 4}, "noise": {"sigma": 0.25}}
    objective = type(OBJECTIVES[name])(**fields.get(name, {}), label_smoothing=0.3)
    out = objective.loss(model, model, new_batch())
    labels = new_batch().labels
    assert torch.equal(out.loss, F.cross_entropy(out.logits, labels, label_smoothing=0.3))
    assert not torch.equal(out.loss, F.cross_entropy(out.logits, labels))


# -- adversarial


def test_the_first_epoch_of_a_warmup_is_clean(model, new_batch):
    objective = FgsmTraining(0.1, eps_warmup_epochs=2)
    (images,) = shown(objective, model, new_batch(epoch=0))
    assert torch.equal(images, new_batch().images)
    clean = Standard().loss(model, model, new_batch())
    assert torch.equal(objective.loss(model, model, new_batch()).loss, clean.loss)


@pytest.mark.parametrize(("epoch", "eps"), [(1, 0.05), (2, 0.1), (9, 0.1)])
def test_training_images_stay_in_the_ball_of_their_epoch(model, new_batch, epoch, eps):
    batch = new_batch(epoch=epoch)
    (images,) = shown(FgsmTraining(0.1, eps_warmup_epochs=2), model, batch)
    moved = (images - batch.images).abs().max()
    assert eps / 2 < moved <= eps + 1e-6
    assert images.min() >= 0
    assert images.max() <= 1


def test_the_attack_leaves_the_model_in_training(model, new_batch):
    model.net.cls_token.requires_grad_(False)
    FgsmTraining(0.1).loss(model, model, new_batch())
    assert all(module.training for module in model.modules())
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert frozen == ["net.cls_token"]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_starts_belong_to_items_and_epochs(model, new_batch):
    objective = FgsmTraining(0.1, num_steps=1)
    (whole,) = shown(objective, model, new_batch())
    (part,) = shown(objective, model, new_batch(slice(5, 9)))
    assert torch.equal(part, whole[5:9])
    (later,) = shown(objective, model, new_batch(epoch=1))
    assert not torch.equal(later, whole)


# -- columns


def test_all_shares_of_a_global_batch_see_the_same_columns(model, new_batch):
    objective = ColumnAblation(3)
    for step in range(12):
        _, first = shown(objective, model, new_batch(slice(0, 11), step=step))
        _, second = shown(objective, model, new_batch(slice(11, 22), step=step))
        assert torch.equal(first, second)
        assert (first.sum(dim=1) == 3).all()


def test_columns_change_with_step_epoch_and_seed(model, new_batch):
    def columns(**address) -> tuple[tuple[bool, ...], ...]:
        batches = [new_batch(slice(0, 1), step=step, **address) for step in range(12)]
        masks = [shown(ColumnAblation(3), model, batch)[1] for batch in batches]
        return tuple(tuple(mask[0].tolist()) for mask in masks)

    runs = [columns(), columns(epoch=1), columns(seed=8)]
    assert all(len(set(run)) > 3 for run in runs)
    assert len(set(runs)) == 3


# -- noise


def test_noise_belongs_to_the_item_not_to_the_batch(model, new_batch):
    objective = GaussianNoise(0.5)
    (whole,) = shown(objective, model, new_batch(step=0))
    (part,) = shown(objective, model, new_batch(slice(3, 8), step=4))
    assert torch.equal(part, whole[3:8])
    assert not torch.equal(shown(objective, model, new_batch(epoch=1))[0], whole)
    assert not torch.equal(shown(objective, model, new_batch(seed=8))[0], whole)


def test_noise_has_its_sigma_and_is_never_clamped(model, new_batch):
    batch = new_batch()
    (noisy,) = shown(GaussianNoise(0.5), model, batch)
    assert (noisy - batch.images).std().item() == pytest.approx(0.5, rel=0.05)  # 1,408 draws
    assert noisy.min() < 0
    assert noisy.max() > 1
