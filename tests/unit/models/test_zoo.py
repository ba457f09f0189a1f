"""Architectures by name."""

import pytest
import torch

from components.core.errors import CasemateError
from components.models.zoo import build_network

TINY = {"embed_dim": 16, "depth": 1, "num_heads": 2}


def build(architecture: str, *, image_size: int = 32, channels: int = 1, **options: object):
    net = build_network(
        architecture, image_size=image_size, channels=channels, num_classes=7, options=options
    )
    return net.eval()


@pytest.mark.parametrize("patch_size", [2, 4, 8])
@pytest.mark.parametrize("architecture", ["tiny_vit", "tiny_xcit"])
def test_tiny_models_cut_the_image_into_patches(architecture, patch_size):
    net = build(architecture, patch_size=patch_size, **TINY)
    x = torch.rand(2, 1, 32, 32)
    embedded = net.patch_embed(x)
    tokens = embedded[0] if architecture == "tiny_xcit" else embedded
    assert tokens.shape == (2, (32 // patch_size) ** 2, 16)
    assert net.patch_embed.num_patches == (32 // patch_size) ** 2
    assert net(x).shape == (2, 7)


def test_a_finer_stem_has_the_weights_of_the_coarse_one():
    fine, coarse = (
        build("tiny_xcit", patch_size=2, **TINY),
        build("tiny_xcit", patch_size=8, **TINY),
    )
    shapes = {name: value.shape for name, value in coarse.state_dict().items()}
    assert {name: value.shape for name, value in fine.state_dict().items()} == shapes


@pytest.mark.parametrize(
    ("name", "options"),
    [("vit_tiny_patch16_224", {"depth": 1, "patch_size": 8}), ("resnet10t", {})],
)
def test_timm_names_are_built_for_the_data(name, options):
    assert build(name, channels=2, **options)(torch.rand(3, 2, 32, 32)).shape == (3, 7)


def test_unknown_architectures_come_with_examples():
    with pytest.raises(CasemateError) as caught:
        build("vit_tinny")
    assert str(caught.value).startswith("model.architecture: vit_tinny is unknown")
    assert "tiny_vit" in str(caught.value)
    assert "vit_base_" in str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "options", "message"),
    [
        ("tiny_vit", {"pach_size": 4}, r"do not fit tiny_vit at 32px.*pach_size"),
        ("tiny_vit", {"num_heads": 3}, r"do not fit tiny_vit"),
        ("tiny_xcit", {"num_heads": 3}, r"do not fit tiny_xcit"),
        ("tiny_vit", {"patch_size": 5}, r"model\.options\.patch_size: 5 does not divide"),
        ("tiny_vit", {"patch_size": 0}, r"model\.options\.patch_size: 0 does not divide"),
        ("tiny_xcit", {"patch_size": 3}, r"model\.options\.patch_size: 3 is not one of 2, 4, 8"),
        ("tiny_vit", {"num_classes": 3}, r"model\.options\.num_classes: 3 follows from the data"),
        ("resnet10t", {"in_chans": 3}, r"model\.options\.in_chans: 3 follows from the data"),
        ("resnet10t", {"depht": 3}, r"do not fit resnet10t.*depht"),
    ],
)
def test_options_that_do_not_fit_are_named(architecture, options, message):
    with pytest.raises(CasemateError, match=message):
        build(architecture, **options)
