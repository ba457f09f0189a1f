"""Adversarial weight perturbation: where it goes, and that it leaves no trace."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad

from components.core.settings import SettingError
from components.train.objectives import awp
from components.train.objectives import settings as s
from components.train.objectives.aas import AasTraining
from components.train.objectives.adversarial import AdversarialTraining
from components.train.objectives.awp import Awp, frozen_statistics, weight_perturbations
from components.train.objectives.base import Objective
from components.train.objectives.base_settings import AasTrainingSettings, AwpSettings
from components.train.objectives.mart import Mart
from components.train.objectives.standard import Standard
from components.train.objectives.trades import Trades
from components.train.session import initial_model

ATTACK = {"eps": 0.1, "num_steps": 2}
SETTINGS = {
    AdversarialTraining: s.FgsmTrainingSettings(**ATTACK),
    Mart: s.MartSettings(**ATTACK),
    Standard: s.StandardSettings(),
    Trades: s.TradesSettings(**ATTACK),
}


def inner_of(kind, **changes) -> Objective:
    return kind(replace(SETTINGS[kind], **changes), label_smoothing=0.0)


def awp_of(kind, **settings) -> Awp:
    return Awp(inner_of(kind), AwpSettings(**settings))


@pytest.fixture
def model(toy_spec):
    return initial_model(toy_spec, seed=0).double().train()


@pytest.fixture
def batch(new_batch):
    batch = new_batch(slice(0, 6))
    return replace(batch, images=batch.images.double())


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(model: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def gradients_by_torch_func(objective, model, batch, gamma):
    """The whole step without `.backward`: v from the gradient at w, the gradient again at w + v."""

    def loss_at(weights):
        class Bound(nn.Module):
            def forward(self, x):
                return functional_call(model, weights, (x,))

        return objective.loss(Bound(), Bound(), batch).loss

    weights = {name: value.detach() for name, value in model.named_parameters()}
    first = grad(loss_at)(weights)
    for name, g in first.items():
        if g.dim() > 1 and "weight" in name:
            w = weights[name]
            length = gamma * (w**2).sum().sqrt() / (g**2).sum().sqrt()
            weights = {**weights, name: w + length * g}
    return grad(loss_at)(weights)


@pytest.mark.parametrize("kind", [AdversarialTraining, Mart, Standard])
def test_the_gradient_is_that_at_the_worst_weights_nearby(kind, model, batch):
    inner = inner_of(kind)
    objective = Awp(inner, AwpSettings(gamma=0.02))
    before = snapshot(model)
    with objective.perturbed(model, model, batch) as worked:
        assert all(parameter.grad is None for parameter in model.parameters())
        objective.loss(model, model, worked).loss.backward()
    assert same(model, before)  # bit for bit
    if kind is not Standard:  # metrics are numbers, which torch.func does not trace
        inner = inner_of(kind, **{} if kind is Mart else {"clean_forward": "none"})
        images = inner.craft(model, batch)
        assert torch.equal(worked.adversarial, images)  # made at w, not at w + v
    expected = gradients_by_torch_func(_Traceable(inner), model, worked, 0.02)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-8, atol=1e-10)
    plain = torch.autograd.grad(inner.loss(model, model, worked).loss, model.net.head.weight)[0]
    assert not torch.allclose(plain, model.net.head.weight.grad, rtol=1e-3)


class _Traceable:
    """The same loss from formulas that torch.func can follow: no `.item()`."""

    def __init__(self, inner) -> None:
        self.inner = inner

    def loss(self, wrapped, bare, batch):
        x = batch.images if batch.adversarial is None else batch.adversarial
        y, log_q = batch.labels[:, None], wrapped(x).log_softmax(1)
        loss = -log_q.gather(1, y)[:, 0]
        if isinstance(self.inner, Mart):
            log_p, q = wrapped(batch.images).log_softmax(1), log_q.exp()
            other = q.gather(1, 1 - y)[:, 0]  # two classes: the wrong one
            kl = (log_p.exp() * (log_p - log_q)).sum(1)
            own = log_p.exp().gather(1, y)[:, 0]
            loss = loss - torch.log(1.0001 - other + 1e-12) + 6 * kl * (1.0000001 - own)
        return SimpleNamespace(loss=loss.mean())


def test_layers_move_by_gamma_times_their_norm_and_nothing_else_moves(model, batch):
    before = snapshot(model)
    objective = awp_of(Trades, gamma=0.01)
    with objective.perturbed(model, model, batch):
        moved = {
            name for name, value in model.named_parameters() if not torch.equal(value, before[name])
        }
        for name in moved:
            value, old = model.get_parameter(name), before[name]
            ratio = (value - old).norm() / old.norm()
            assert ratio.item() == pytest.approx(0.01, rel=1e-6)
    assert moved == {
        "net.patch_embed.proj.weight",
        "net.blocks.0.attn.qkv.weight",
        "net.blocks.0.attn.proj.weight",
        "net.blocks.0.mlp.fc1.weight",
        "net.blocks.0.mlp.fc2.weight",
        "net.head.weight",
    }  # no bias, norm, class token or position embedding


def test_perturbation_raises_the_loss_and_an_error_still_restores(model, batch):
    objective = awp_of(Trades, gamma=0.02)
    images = objective.inner.craft(model, batch)
    before, plain = (
        snapshot(model),
        objective.inner.loss(model, model, replace(batch, adversarial=images)),
    )
    with objective.perturbed(model, model, batch) as worked:
        assert objective.loss(model, model, worked).loss > plain.loss
    with pytest.raises(KeyError), objective.perturbed(model, model, batch):
        raise KeyError
    assert same(model, before)


def test_running_statistics_meet_the_training_pass_alone(batch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 2)).double().train()
    fresh = snapshot(model)
    objective = awp_of(AdversarialTraining)
    with objective.perturbed(model, model, batch) as worked:
        assert torch.equal(model[1].running_mean, fresh["1.running_mean"])
        assert int(model[1].num_batches_tracked) == 0
        objective.loss(model, model, worked)
    assert int(model[1].num_batches_tracked) == 1
    expected = 0.1 * worked.adversarial.flatten(1).mean(0)  # momentum 0.1 from zero
    torch.testing.assert_close(model[1].running_mean, expected)
    assert model[1].track_running_stats
    with frozen_statistics(model):  # the batch still normalises itself
        frozen = model(batch.images)
    torch.testing.assert_close(frozen, model(batch.images))


def test_weights_rest_until_the_start_epoch(model, batch):
    objective = awp_of(Trades, start_epoch=3)
    before = snapshot(model)
    for epoch, still in ((2, True), (3, False)):
        with objective.perturbed(model, model, replace(batch, epoch=epoch)) as worked:
            assert same(model, before) == still
            objective.loss(model, model, worked)


def test_all_workers_move_alike(model, batch, monkeypatch):
    """Each worker has half of the batch; the sum of their gradients travels."""
    halves = [
        replace(batch, images=batch.images[r], labels=batch.labels[r])
        for r in (slice(3), slice(3, 6))
    ]
    losses = [inner_of(Standard).loss(model, model, part).loss for part in [batch, *halves]]
    whole = weight_perturbations(model, losses[0], gamma=0.01)
    weights = [weight for weight, _ in whole]
    others = torch.autograd.grad(losses[2], weights)
    others = {gradient.shape: gradient for gradient in others}
    assert len(others) == len(weights)
    monkeypatch.setattr(awp.torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(awp.torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(awp.torch.distributed, "all_reduce", lambda g: g.add_(others[g.shape]))
    mine = weight_perturbations(model, losses[1], gamma=0.01)
    for (_, expected), (_, found) in zip(whole, mine, strict=True):
        torch.testing.assert_close(found, expected)


def test_a_vanished_gradient_moves_nothing():
    model = nn.Linear(2, 2, bias=False)
    ((_, v),) = weight_perturbations(model, 0.0 * model(torch.ones(1, 2)).sum(), gamma=0.01)
    assert torch.equal(v, torch.zeros(2, 2))


def test_misuse_is_refused(model, batch):
    with pytest.raises(ValueError, match="inside `perturbed`"):
        awp_of(Trades).loss(model, model, batch)
    with pytest.raises(TypeError, match="cannot be inside awp"):
        Awp(AasTraining(inner_of(Trades), AasTrainingSettings()), AwpSettings())
    with pytest.raises(SettingError, match=r"gamma: 0"):
        AwpSettings(gamma=0)
