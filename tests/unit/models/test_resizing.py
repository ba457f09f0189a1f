"""A resize as matrix products against torch's own."""

import pytest
import torch
import torch.nn.functional as F

from components.models.pixels import PixelModel
from components.models.resizing import resized
from components.models.spec import ModelSpec


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("shape", "side"), [((8, 8), 28), ((32, 24), 12), ((7, 7), 7)])
def test_it_is_the_anti_aliased_resize(mode, shape, side):
    images = torch.rand(2, 3, *shape, generator=torch.Generator().manual_seed(0))
    wanted = F.interpolate(images, size=(side, side), mode=mode, antialias=True)
    torch.testing.assert_close(resized(images, side, mode=mode), wanted, atol=2e-6, rtol=0)


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="mode must be one of"):
        resized(torch.zeros(1, 1, 2, 2), 4, mode="nearest")


def test_a_model_that_enlarges_bicubically():
    options = {"depth": 1, "embed_dim": 8, "num_heads": 1, "patch_size": 4}
    spec = ModelSpec(
        "tiny_vit", 3, 1, 8, (0.5,), (0.5,), upsample=16, upsample_mode="bicubic",
        token_policy="drop", options=options,
    )  # fmt: skip
    model = PixelModel(spec).eval()
    images = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(model(images), model.net((resized(images, 16) - 0.5) / 0.5))
    assert ModelSpec.from_dict(spec.to_dict()) == spec
    visible = torch.zeros(8, 8, dtype=torch.bool)
    visible[:, :2] = True
    shown = model.forward_ablated(images, visible)
    images[:, :, :, 2:] = 1 - images[:, :, :, 2:]  # hidden pixels: not a bit may change
    assert torch.equal(model.forward_ablated(images, visible), shown)
