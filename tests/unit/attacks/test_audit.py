"""The whole suite on trained models: a plain one passes, masked ones fail for the right reason."""

import copy

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from components.attacks.interface import Items
from components.attacks.sanity.audit import STEPS, audit
from components.attacks.sanity.findings import verdict
from components.core.errors import CasemateError
from components.models.attention.discover import attention_of
from components.models.attention.scaling import fold_scales
from components.models.pixels import PixelModel
from components.models.spec import ModelSpec
from tests.unit.attacks.saturated import saturated_attention, saturated_images

NUM_ITEMS = 24
LINF = {"norm": "linf", "eps": 0.08}
SMALL = {"patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2}


@pytest.fixture(scope="module")
def digits():
    bunch = load_digits()
    x = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16
    return x, torch.tensor(bunch.target)


@pytest.fixture(scope="module")
def items(digits):
    x, y = (part[-NUM_ITEMS:] for part in digits)
    return Items(x, y, tuple(f"digit-{i}" for i in range(NUM_ITEMS)), run_seed=0)


@pytest.fixture(scope="module")
def model(digits):
    """A plainly trained transformer."""
    x, y = (part[:1400] for part in digits)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = PixelModel(ModelSpec("tiny_vit", 10, 1, 8, (0.3,), (0.35,), options=SMALL))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for rows in [rows for _ in range(6) for rows in torch.randperm(1400).split(50)]:
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    return model.eval()


class Rescaled(nn.Module):
    """The same predictions; beyond a gap of 104, cross-entropy has no gradient in float32."""

    def __init__(self, model, scale):
        super().__init__()
        self.model, self.scale = model, scale

    def forward(self, x):
        return self.scale * self.model(x)


def failed(found):
    return {f.name for f in found.findings if not f.ok}


@pytest.mark.parametrize("budget", [LINF, {"norm": "l2", "eps": 0.4}], ids=["linf", "l2"])
def test_a_plainly_trained_model_is_reliable(model, items, budget):
    found = audit(model, items, net=model.net, **budget, surrogate=model)
    assert verdict(found.findings) == ("reliable", ())
    assert len({f.name for f in found.findings}) == len(found.findings) == 14
    curve = [*found.accuracy_by_steps.values()]
    assert list(found.accuracy_by_steps) == list(STEPS)
    assert 0 < curve[-1] < float((model(items.x).argmax(dim=1) == items.y).double().mean())
    assert [*found.accuracy_by_eps.values()][-1] == 0
    assert [*found.gaps] == [site.name for site in attention_of(model.net)]
    assert all(gaps.num_gaps == NUM_ITEMS * 2 * 5 * 1 for gaps in found.gaps.values())


def test_a_huge_logit_scale_is_suspect_for_its_zero_gradients(model, items):
    found = audit(Rescaled(model, 1e4), items, net=model.net, **LINF)
    assert {"zero gradients", "unbounded attack"} <= failed(found)
    assert not failed(found) & {"attention underflow", "logits", "determinism", "batch invariance"}
    assert verdict(found.findings).label == "suspect"


def test_a_huge_attention_scale_is_suspect_for_its_underflow(model, items):
    sharp = copy.deepcopy(model)
    fold_scales(sharp.net, torch.full((len(attention_of(sharp.net)),), 1e3))
    found = audit(sharp, items, net=sharp.net, **LINF)
    assert {"attention underflow", "attention cancellation"} <= failed(found)
    assert any("attention underflow: in blocks." in r for r in verdict(found.findings).reasons)


def test_saturated_attention_is_suspect_for_its_cancelled_gradients():
    """Gap 50: the winner's gradient cancels in float32, without underflow."""
    net = saturated_attention("A", 50.0)
    x = saturated_images(4)
    items = Items(x, torch.zeros(4, dtype=torch.int64), tuple(map(str, range(4))), run_seed=0)
    found = audit(net, items, net=net, norm="linf", eps=8 / 255)
    assert {"zero gradients", "attention cancellation"} <= failed(found)
    assert "attention underflow" not in failed(found)


def test_a_surrogate_that_sees_more_than_the_white_box_is_noticed(model, items):
    """Gradients stop inside the model: every attack is blind, but not that of its open copy."""

    class Shattered(nn.Module):
        def forward(self, x):
            return model(x.detach()) + 0 * x.flatten(1).sum(dim=1, keepdim=True)

    found = audit(Shattered(), items, net=model.net, **LINF, surrogate=model)
    assert {"zero gradients", "transfer against white box"} <= failed(found)


def test_bad_input_ends_early_with_one_clear_line(model, items):
    bright = Items(255 * items.x, items.y, items.item_ids, run_seed=0)
    found = audit(model, bright, net=model.net, **LINF)
    assert [f.name for f in found.findings] == ["input range"]
    assert "from 0 to 255" in verdict(found.findings).reasons[0]
    with pytest.raises(CasemateError, match="digit-0"):
        audit(Rescaled(model, float("nan")), items, net=model.net, **LINF)
