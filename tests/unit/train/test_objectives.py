"""Objectives: they can be minimised, and their randomness belongs to items and steps."""

from copy import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from components.attacks.gradient import START_OFFSET
from components.attacks.gradients import attack_mode
from components.attacks.projections import linf_bounds
from components.attacks.starts import random_starts
from components.core.seeding import generator_for
from components.data.ablation import column_mask
from components.train.objectives import settings as s
from components.train.objectives.ablation import AblationTraining
from components.train.objectives.awp import Awp
from components.train.objectives.base import Objective
from components.train.objectives.base_settings import AasTrainingSettings, AwpSettings
from components.train.objectives.make import make_objective
from components.train.objectives.noise import DenoisedFineTuning
from components.train.session import initial_model


def blur(images, sigma, generator):
    return F.avg_pool2d(images, 3, stride=1, padding=1).clamp(0, 1)


new_objective = partial(make_objective, label_smoothing=0.0)
PGD = {"eps": 0.05, "num_steps": 3}
SETTINGS = {
    "standard": s.StandardSettings(),
    "fgsm": s.FgsmTrainingSettings(eps=0.05),
    "pgd": s.PgdTrainingSettings(**PGD, clean_forward="train_stats"),
    "columns": s.ColumnsTrainingSettings(band=4),
    "rows": s.AblationTrainingSettings(size=4, shape="row", position="image"),
    "blocks": s.AblationTrainingSettings(size=6, shape="block"),
    "noise": s.GaussianTrainingSettings(sigma=0.25),
    "trades": s.TradesSettings(**PGD),
    "mart": s.MartSettings(**PGD),
    "awp": s.TradesSettings(**PGD, awp=AwpSettings()),
    "aas": s.PgdTrainingSettings(**PGD, aas=AasTrainingSettings()),
}
DENOISED = DenoisedFineTuning(
    s.DenoisedTrainingSettings(sigma=0.25, denoiser="model:any"), denoise=blur, label_smoothing=0.0
)
OBJECTIVES = {name: new_objective(settings) for name, settings in SETTINGS.items()} | {
    "awp around noise": Awp(new_objective(SETTINGS["noise"]), AwpSettings()),
    "denoised": DENOISED,
}
COLUMNS = AblationTraining(s.ColumnsTrainingSettings(band=3), label_smoothing=0.0)


def fgsm_training(**settings) -> Objective:
    return new_objective(s.FgsmTrainingSettings(**settings))


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
    with objective.perturbed(wrapped, model, batch) as batch:
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
    for step in range(30):
        with objective.perturbed(model, model, new_batch(step=step)) as batch:
            out = objective.loss(model, model, batch)
            optimizer.zero_grad()
            out.loss.backward()
        optimizer.step()
        losses.append(out.loss.item())
    assert losses[-1] < losses[0] / 2
    assert out.logits.shape == (22, 2)
    assert not out.logits.requires_grad
    assert (out.adversarial_logits is None) == (objective.eps_at(0) is None)
    assert out.adversarial_logits is None or not out.adversarial_logits.requires_grad
    logits = objective.validation_logits(model, new_batch())
    assert (logits.argmax(dim=1) == new_batch().labels).float().mean() > 0.9


@pytest.mark.parametrize("name", OBJECTIVES)
def test_workers_wait_for_each_other_once_in_a_step(name, model, new_batch):
    shown(OBJECTIVES[name], model, new_batch())
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("name", ["standard", "fgsm", "columns", "rows", "noise", "denoised"])
def test_label_smoothing_reaches_the_loss(name, model, new_batch):
    objective = copy(OBJECTIVES[name])
    objective.label_smoothing = 0.3
    out = objective.loss(model, model, new_batch())
    labels = new_batch().labels
    assert torch.equal(out.loss, F.cross_entropy(out.logits, labels, label_smoothing=0.3))
    assert not torch.equal(out.loss, F.cross_entropy(out.logits, labels))


# -- adversarial


def test_the_first_epoch_of_a_warmup_is_clean(model, new_batch):
    objective = fgsm_training(eps=0.1, eps_warmup_epochs=2)
    (images,) = shown(objective, model, new_batch(epoch=0))
    assert torch.equal(images, new_batch().images)
    clean = OBJECTIVES["standard"].loss(model, model, new_batch())
    assert torch.equal(objective.loss(model, model, new_batch()).loss, clean.loss)


@pytest.mark.parametrize(("epoch", "eps"), [(1, 0.05), (2, 0.1), (9, 0.1)])
def test_training_images_stay_in_the_ball_of_their_epoch(model, new_batch, epoch, eps):
    batch = new_batch(epoch=epoch)
    (images,) = shown(fgsm_training(eps=0.1, eps_warmup_epochs=2), model, batch)
    moved = (images - batch.images).abs().max()
    assert eps / 2 < moved <= eps + 1e-6
    assert images.min() >= 0
    assert images.max() <= 1


def test_the_attack_leaves_the_model_in_training(model, new_batch):
    model.net.cls_token.requires_grad_(False)
    fgsm_training(eps=0.1).loss(model, model, new_batch())
    assert all(module.training for module in model.modules())
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert frozen == ["net.cls_token"]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_starts_belong_to_items_and_epochs(model, new_batch):
    objective = fgsm_training(eps=0.1)
    (whole,) = shown(objective, model, new_batch())
    (part,) = shown(objective, model, new_batch(slice(5, 9)))
    assert torch.equal(part, whole[5:9])
    (later,) = shown(objective, model, new_batch(epoch=1))
    assert not torch.equal(later, whole)


@pytest.mark.parametrize("num_steps", [1, 2])
def test_training_images_are_those_of_the_plain_loop(model, new_batch, num_steps):
    """Bit for bit: finished trainings are to be repeated, so streams and steps may not change."""
    batch = new_batch(epoch=3)
    starts = random_starts(batch.item_ids, (1, 8, 8), run_seed=7, stream="fgsm-3")
    x, eps, step_size = batch.images, 0.1, 1.5 * 0.1 / num_steps
    low, high = linf_bounds(x, eps=eps)
    expected = (x + eps * starts + START_OFFSET).clamp(low, high)
    with attack_mode(model):
        for _ in range(num_steps):
            leaf = expected.detach().requires_grad_()
            losses = F.cross_entropy(model(leaf), batch.labels, reduction="sum")
            (gradient,) = torch.autograd.grad(losses, leaf)
            expected = (expected + step_size * gradient.sign()).clamp(low, high)
    objective = fgsm_training(eps=0.1, num_steps=num_steps)
    assert torch.equal(objective.craft(model, batch), expected)


# -- columns


def test_columns_are_where_they_always_were(new_batch):
    start = int(torch.randint(8, (), generator=generator_for(7, "columns", 2, 5)))
    visible = COLUMNS.visible(new_batch(epoch=2, step=5))
    assert torch.equal(visible[0], column_mask(8, start, 3))


def test_all_shares_of_a_global_batch_see_the_same_columns(model, new_batch):
    objective = COLUMNS
    for step in range(12):
        _, first = shown(objective, model, new_batch(slice(0, 11), step=step))
        _, second = shown(objective, model, new_batch(slice(11, 22), step=step))
        assert torch.equal(first, second)
        assert (first.sum(dim=1) == 3).all()


def test_columns_change_with_step_epoch_and_seed(model, new_batch):
    def columns(**address) -> tuple[tuple[bool, ...], ...]:
        batches = [new_batch(slice(0, 1), step=step, **address) for step in range(12)]
        masks = [shown(COLUMNS, model, batch)[1] for batch in batches]
        return tuple(tuple(mask[0].tolist()) for mask in masks)

    runs = [columns(), columns(epoch=1), columns(seed=8)]
    assert all(len(set(run)) > 3 for run in runs)
    assert len(set(runs)) == 3


# -- noise


def test_noise_belongs_to_the_item_not_to_the_batch(model, new_batch):
    objective = new_objective(s.GaussianTrainingSettings(sigma=0.5))
    (whole,) = shown(objective, model, new_batch(step=0))
    (part,) = shown(objective, model, new_batch(slice(3, 8), step=4))
    assert torch.equal(part, whole[3:8])
    assert not torch.equal(shown(objective, model, new_batch(epoch=1))[0], whole)
    assert not torch.equal(shown(objective, model, new_batch(seed=8))[0], whole)


def test_noise_has_its_sigma_and_is_never_clamped(model, new_batch):
    batch = new_batch()
    (noisy,) = shown(new_objective(s.GaussianTrainingSettings(sigma=0.5)), model, batch)
    assert (noisy - batch.images).std().item() == pytest.approx(0.5, rel=0.05)  # 1,408 draws
    assert noisy.min() < 0
    assert noisy.max() > 1
