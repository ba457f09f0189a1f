"""The input adapter: native pixels outside, up-sampling and normalisation inside."""

import pytest
import torch

from components.core.errors import CasemateError
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
    assert native.num_kept(visible[None]) == large.num_kept(grow(visible[None], 3))


def test_weights_of_the_adapter_are_not_saved(new_model):
    names = new_model().state_dict()
    assert names
    assert all(name.startswith("net.") for name in names)


def test_the_mask_may_be_passed_to_forward(new_model, images):
    model = new_model(token_policy="drop")  # wrappers that synchronise gradients only know forward
    visible = column_mask(16, 3, 5).expand(16, 16)
    assert torch.equal(model(images, visible), model.forward_ablated(images, visible))


def bilinear_weights(size: int, native: int) -> torch.Tensor:
    """(size, native): rows of linear interpolation between pixel centres, edges repeated."""
    centres = ((torch.arange(size, dtype=torch.float64) + 0.5) * native / size - 0.5).clamp(min=0)
    left = centres.floor().long().clamp(max=native - 1)
    right = (left + 1).clamp(max=native - 1)
    weights = torch.zeros(size, native, dtype=torch.float64)
    rows = torch.arange(size)
    weights.index_put_((rows, left), 1 - (centres - left), accumulate=True)
    weights.index_put_((rows, right), centres - left, accumulate=True)
    return weights


@pytest.mark.parametrize("size", [8, 12, 20, 48])
def test_bilinear_resizing_keeps_pixel_centres(new_model, images, size):
    model = new_model(upsample=size, upsample_mode="bilinear")
    weights = bilinear_weights(size, 16)
    resized = torch.einsum("yi,bcij,xj->bcyx", weights, images.double(), weights)
    torch.testing.assert_close(
        model.network_input(images).double(), (resized - MEAN) / STD, rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("policy", ["drop", "mask"])
@pytest.mark.parametrize("start", [0, 6, 13])
def test_bilinear_votes_ignore_hidden_pixels(new_model, images, policy, start):
    """Smoothing mixes neighbours, so masking must come first: else hidden pixels leak in."""
    model = new_model(upsample=48, upsample_mode="bilinear", token_policy=policy)
    visible = column_mask(16, start, 5).expand(16, 16)
    other = torch.where(visible, images, 1 - images)
    assert torch.equal(
        model.forward_ablated(images, visible), model.forward_ablated(other, visible)
    )


def test_bilinear_keeps_every_token_that_a_visible_pixel_reaches(new_model):
    model = new_model(upsample=32, upsample_mode="bilinear", token_policy="drop")
    nearest = new_model(upsample=32, token_policy="drop")
    visible = column_mask(16, 4, 2).expand(16, 16)  # columns 8 to 11 of 32, smeared to 7 to 12
    assert nearest.num_kept(visible[None]) == 8
    assert model.num_kept(visible[None]) == 3 * 8


@pytest.mark.parametrize("shape", [(1, 16, 16), (3, 15, 16), (3, 16, 32), (3, 32, 32)])
def test_images_of_another_shape_are_refused(new_model, shape):
    model = new_model(upsample=32)
    visible = torch.ones(16, 16, dtype=torch.bool)
    for run in (lambda x: model(x), lambda x: model(x, visible)):
        with pytest.raises(CasemateError, match=r"^image: .* is not the 3x16x16"):
            run(torch.rand(2, *shape))
