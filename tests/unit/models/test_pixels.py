"""The input adapter: native pixels outside, up-sampling and normalisation inside."""

import pytest
import torch

from components.data.ablation import column_mask

MEAN = torch.tensor([0.4, 0.5, 0.6]).view(1, 3, 1, 1)
STD = torch.tensor([0.2, 0.3, 0.25]).view(1, 3, 1, 1)


def grow(pixels: torch.Tensor, factor: int) -> torch.Tensor:
    return pixels.repeat_interleave(factor, dim=-1).repeat_interleave(factor, dim=-2)


def test_normalisation_happens_inside(new_model, images):
    model = new_model()
    assert torch.equal(model(images), model.net((images - MEAN) / STD))
    assert not torch.equal(model(images), model.net(images))


def test_hidden_pixels_are_black_before_normalisation(new_model, images):
    model = new_model(token_policy="mask")
    visible = column_mask(16, 3, 5).expand(16, 16)
    inputs = torch.where(visible, (images - MEAN) / STD, (0 - MEAN) / STD)
    assert torch.equal(model.forward_ablated(images, visible), model.net(inputs))


@pytest.mark.parametrize("policy", ["drop", "mask"])
@pytest.mark.parametrize("start", [0, 5, 14])
def test_ablation_commutes_with_upsampling(new_model, images, policy, start):
    """Ablating at native size equals ablating the grown image: budgets live in native pixels."""
    native = new_model(token_policy=policy, upsample=48)
    large = new_model(token_policy=policy, image_size=48)  # equal weights: same seed, same network
    visible = column_mask(16, start, 5).expand(16, 16)
    logits = native.forward_ablated(images, visible)
    assert torch.equal(logits, large.forward_ablated(grow(images, 3), grow(visible, 3)))
    assert torch.equal(native(images), large(grow(images, 3)))
    assert native.num_kept(visible) == large.num_kept(grow(visible, 3))


def test_weights_of_the_adapter_are_not_saved(new_model):
    names = new_model().state_dict()
    assert names
    assert all(name.startswith("net.") for name in names)


def test_the_mask_may_be_passed_to_forward(new_model, images):
    model = new_model(token_policy="drop")  # wrappers that synchronise gradients only know forward
    visible = column_mask(16, 3, 5).expand(16, 16)
    assert torch.equal(model(images, visible), model.forward_ablated(images, visible))
