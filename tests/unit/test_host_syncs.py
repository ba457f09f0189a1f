"""The stand-in for a GPU: equal values, and every place noted where the host would wait."""

import pytest
import torch

from components.models.pixels import PixelModel
from tests.unit.host_syncs import DEVICE, HostSyncs
from tests.unit.networks import SMALL_SPEC

WAITS = {
    "item": lambda t: t.sum().item(),
    "bool": lambda t: bool((t > 0).any()),
    "int": lambda t: int(t.argmax()),
    "tolist": lambda t: t.tolist(),
    "cpu": lambda t: t.cpu(),
    "numpy": lambda t: t.cpu().numpy(),
    "nonzero": lambda t: (t > 0).nonzero(),
    "mask": lambda t: t[t > 0],
    "mask_set": lambda t: t.clone().__setitem__(t > 0, t[:1].expand(2)),
    "host_index": lambda t: t[torch.tensor([0, 2])],
    "upload": lambda t: t + torch.tensor([1.0, 2, 3], device=t.device),
    "upload_to": lambda t: t + torch.ones(3).to(t.device),
    "copy_": lambda t: torch.empty(3).copy_(t),
    "masked_select": lambda t: t.masked_select(t > 0),
    "equal": lambda t: torch.equal(t, t + 1),
    "unique": lambda t: t.unique(),
    "bincount": lambda t: t.abs().long().bincount(),
    "one_hot": lambda t: torch.nn.functional.one_hot(t.abs().long()),
    "repeat_interleave": lambda t: t.repeat_interleave(t.abs().long()),
}
FREE = {
    "sum": lambda t: (t.sum() + 1) * 0.5,
    "where": lambda t: torch.where(t > 0, t, 0.0),
    "fill": lambda t: t.clone().__setitem__(t > 0, 1.0),
    "index": lambda t: t[t.argsort()],
    "in_place": lambda t: t.clone().mul_(2).clamp_(0, 1),
    "factories": lambda t: torch.arange(3, device=t.device) + torch.zeros_like(t) + t.new_ones(3),
    "non_blocking": lambda t: t + torch.ones(3).to(t.device, non_blocking=True),
    "host": lambda t: bool(torch.tensor([1, 2]).sum() > 2),
    "shape": lambda t: len(t) + t.numel(),
    "views": lambda t: t.clone()[1:].add_(1),
    "out": lambda t: torch.gt(t, 0, out=torch.empty_like(t)),
}


@pytest.mark.parametrize("name", WAITS)
def test_waits_are_noted_with_their_line(name):
    with HostSyncs() as syncs:
        t = torch.tensor([1.0, -2.0, 3.0]).to(DEVICE)
        syncs.clear()
        WAITS[name](t)
    assert syncs.count >= 1
    assert all(place.startswith("tests/unit/test_host_syncs.py:") for place in syncs.places)


@pytest.mark.parametrize("name", FREE)
def test_work_of_the_device_alone_is_free(name):
    with HostSyncs() as syncs:
        t = torch.tensor([1.0, -2.0, 3.0]).to(DEVICE)
        syncs.clear()
        found = FREE[name](t)
        assert syncs.places == {}
        expected = FREE[name](torch.tensor([1.0, -2.0, 3.0]))
        if isinstance(found, torch.Tensor):
            assert found.device == DEVICE
            assert torch.equal(found.cpu(), expected)
        else:
            assert found == expected


def test_two_devices_do_not_mix():
    with HostSyncs(), pytest.raises(RuntimeError, match="same device"):
        torch.ones(3).to(DEVICE) + torch.ones(3)


def test_a_training_step_has_the_gradients_of_the_cpu_and_only_its_own_waits():
    images, labels = torch.rand(4, 3, 16, 16), torch.tensor([0, 1, 2, 3])

    def step(model, images, labels):
        model.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        return loss

    model = PixelModel(SMALL_SPEC)
    step(model, images, labels)
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with HostSyncs() as syncs:
        model, images, labels = model.to(DEVICE), images.to(DEVICE), labels.to(DEVICE)
        syncs.clear()
        loss = step(model, images, labels)
        assert syncs.places == {}
        loss.item()
        assert syncs.count == 1
        found = [parameter.grad.cpu() for parameter in model.parameters()]
    torch.testing.assert_close(found, expected)
