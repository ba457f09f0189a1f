"""The training attack: its fast view of the model, noise drawn ahead, and no waits on a device."""

from dataclasses import replace

import pytest
import torch

from components.attacks.gradients import attack_mode
from components.core.errors import CasemateError
from components.models import fast
from components.models.pixels import PixelModel
from components.train.objectives import settings as s
from components.train.objectives.base import Batch
from components.train.objectives.base_settings import AwpSettings
from components.train.objectives.make import make_objective
from tests.unit.host_syncs import DEVICE, HostSyncs
from tests.unit.networks import SMALL_SPEC

EPS = 8 / 255
SETTINGS = {
    "fgsm": s.FgsmTrainingSettings(eps=EPS, clean_forward="none"),
    "pgd": s.PgdTrainingSettings(eps=EPS, num_steps=3, clean_forward="none"),
    "trades": s.TradesSettings(eps=EPS, num_steps=3),
    "trades, uniform": s.TradesSettings(eps=EPS, num_steps=3, start="uniform"),
    "mart": s.MartSettings(eps=EPS, num_steps=3),
    "awp": s.TradesSettings(eps=EPS, num_steps=2, awp=AwpSettings(start_epoch=0)),
}
cases = pytest.mark.parametrize("name", SETTINGS)


def problem():
    torch.manual_seed(0)
    model = PixelModel(SMALL_SPEC)
    images = torch.rand(6, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    ids = tuple(f"item-{i}" for i in range(6))
    return model, Batch(images, torch.arange(6) % 5, ids, seed=3, epoch=2, step=4, num_steps=9)


def objective_of(name):
    return make_objective(SETTINGS[name], label_smoothing=0.0)


def gradients(model, objective, batch):
    model.train()
    model.zero_grad()
    with objective.perturbed(model, model, batch) as seen:
        objective.loss(model, model, seen).loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@cases
def test_images_are_crafted_by_the_fast_pass_and_the_outer_step_is_the_plain_one(name, monkeypatch):
    """Both passes agree up to rounding, so images differ where a gradient is near zero only."""
    model, batch = problem()
    crafted = objective_of(name).craft(model, batch)
    fast_calls = []
    plain_product = fast.Narrowed.__call__
    monkeypatch.setattr(
        fast.Narrowed, "__call__", lambda *a, **k: fast_calls.append(1) or plain_product(*a, **k)
    )
    objective = objective_of(name)
    assert torch.equal(objective.craft(model, batch), crafted)
    assert len(fast_calls) > 0
    fast_calls.clear()
    ready = replace(batch, adversarial=crafted)
    found = gradients(model, objective, ready)
    assert fast_calls == []
    monkeypatch.setattr(fast, "num_tokens_read", lambda net: 0)
    monkeypatch.setattr(fast, "is_patchwise", lambda conv: False)
    plain = objective_of(name).craft(model, batch)
    assert ((plain - crafted).abs() > 1e-6).double().mean() < 0.01
    assert all(
        torch.equal(*pair) for pair in zip(gradients(model, objective, ready), found, strict=True)
    )


@cases
def test_noise_drawn_ahead_is_that_of_the_step(name):
    model, batch = problem()
    noise = objective_of(name).start_noise(
        batch.item_ids, batch.images.shape[1:], run_seed=batch.seed, epoch=batch.epoch
    )
    crafted = objective_of(name).craft(model, batch)
    assert torch.equal(objective_of(name).craft(model, replace(batch, start_noise=noise)), crafted)
    other = objective_of(name).craft(model, replace(batch, start_noise=-noise))
    assert not torch.equal(other, crafted)


def test_objectives_without_an_attack_need_no_noise():
    objective = make_objective(s.StandardSettings(), label_smoothing=0.0)
    assert objective.start_noise(("a",), (3, 4, 4), run_seed=0, epoch=0) is None


@cases
def test_crafting_does_not_wait_for_the_device(name):
    model, batch = problem()
    objective = objective_of(name)
    expected = objective_of(name).craft(model, batch)
    noise = objective.start_noise(
        batch.item_ids, batch.images.shape[1:], run_seed=batch.seed, epoch=batch.epoch
    )
    with HostSyncs() as syncs:
        model = model.to(DEVICE)
        there = replace(
            batch,
            images=batch.images.to(DEVICE),
            labels=batch.labels.to(DEVICE),
            start_noise=noise.to(DEVICE),
        )
        syncs.clear()
        found = objective.craft(model, there)
        assert syncs.places == {}
        torch.testing.assert_close(found.cpu(), expected, atol=1e-5, rtol=0)


def test_faults_on_a_device_are_an_error_some_steps_later(monkeypatch):
    monkeypatch.setattr("components.train.objectives.inner.CHECK_EVERY", 3)
    model, batch = problem()
    with torch.no_grad():
        model.net.head.bias[2] = float("nan")
    objective = objective_of("fgsm")
    with pytest.raises(CasemateError, match="not finite"):
        objective.craft(model, batch)  # a CPU looks at once
    with HostSyncs():
        model = model.to(DEVICE)
        there = replace(batch, images=batch.images.to(DEVICE), labels=batch.labels.to(DEVICE))
        objective = objective_of("fgsm")
        objective.craft(model, there)
        objective.craft(model, there)
        with pytest.raises(CasemateError, match="not finite"):
            objective.craft(model, there)


def test_images_outside_of_the_range_are_refused():
    model, batch = problem()
    with attack_mode(model), pytest.raises(ValueError, match=r"\[0, 1\]"):
        objective_of("fgsm").craft(model, replace(batch, images=batch.images + 1))
