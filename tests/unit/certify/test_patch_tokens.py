"""What patch votes rest on, for rows and blocks too: dropped tokens, and blindness to the rest."""

from dataclasses import replace

import pytest
import timm
import torch

from components.data.ablation import KINDS, Ablations
from components.models.pixels import PixelModel
from components.models.tokens import visible_tokens
from tests.unit.networks import SMALL_SPEC, scattered


def make_model(policy):
    """Untrained, with weights large enough for logits to disagree."""
    return scattered(lambda: PixelModel(replace(SMALL_SPEC, token_policy=policy)), by=0.2)


@pytest.fixture(scope="module")
def dropping():
    return make_model("drop")


@pytest.fixture
def image():
    return torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def some_masks(kind, band=5, stride=5):
    """Ablations over the seam included: 16 is no multiple of 5."""
    return Ablations(kind=kind, image_size=(16, 16), band=band, stride=stride).masks()


@pytest.mark.parametrize("kind", KINDS)
def test_dropping_equals_hidden_keys_and_differs_from_black_tokens(dropping, image, kind):
    net = dropping.net
    assert isinstance(net, timm.models.VisionTransformer)
    differs = False
    with torch.inference_mode():
        for visible in some_masks(kind):
            shown = torch.where(visible, image, torch.zeros(()))
            keep = visible_tokens(visible[None], (4, 4))
            seen = torch.cat([torch.ones(1, 1, dtype=torch.bool), keep], dim=1)
            inputs = dropping.network_input(shown)
            # timm's own attention mask: every token is there, no query sees the dropped ones
            hidden = net(inputs, attn_mask=seen[:, None, None, :])
            dropped = dropping.forward_ablated(image, visible)
            assert (dropped - hidden).abs().max() < 1e-5
            differs |= bool((dropped - net(inputs)).abs().max() > 1e-3)
    assert differs


@pytest.mark.parametrize("kind", KINDS)
def test_an_ablation_that_keeps_everything_is_the_plain_pass(dropping, image, kind):
    with torch.inference_mode():
        for visible in some_masks(kind, band=16, stride=16):
            assert visible.all()
            assert torch.equal(dropping.forward_ablated(image, visible), dropping(image))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["drop", "mask"])
def test_pixels_outside_an_ablation_never_reach_its_vote(dropping, image, kind, policy):
    model = dropping if policy == "drop" else make_model(policy)
    with torch.inference_mode():
        for visible in some_masks(kind)[::3]:
            logits = model.forward_ablated(image, visible)
            for poison in (1.0, float("nan")):
                attacked = torch.where(visible, image, torch.tensor(poison))
                assert torch.equal(model.forward_ablated(attacked, visible), logits)
            seen = torch.where(visible, 1 - image, image)
            assert not torch.equal(model.forward_ablated(seen, visible), logits)
