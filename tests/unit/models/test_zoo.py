"""Architectures by name."""

import pytest
import timm
import torch
import torch.nn.functional as F

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


SHRUNK = {
    "cait_s12_224": {"depth": 1, "embed_dim": 32},
    "vit_tiny_patch32_224": {"depth": 1},
    "xcit_medium_12_p16_224": {"depth": 1, "embed_dim": 32},
    "xcit_large_12_p8_224": {"depth": 1, "embed_dim": 32},
    "resnet50_gelu": {"layers": (1, 1, 1, 1)},
    "wrn_28_10": {"layers": (1, 1, 1), "widths": (8, 16, 32)},
    "preact_resnet18": {"layers": (1, 1), "widths": (8, 16)},
}


@pytest.mark.parametrize("name", sorted(SHRUNK))
def test_names_that_timm_lacks_are_built_for_the_data(name):
    assert not timm.is_model(name)
    net = build(name, channels=2, **SHRUNK[name])
    assert net(torch.rand(3, 2, 32, 32)).shape == (3, 7)


def test_the_gelu_resnet_has_no_other_activation():
    kinds = {type(m).__name__ for m in build("resnet50_gelu").modules()}
    assert "GELU" in kinds
    assert "ReLU" not in kinds


def test_an_xcit_takes_smaller_patches():
    net = build("xcit_nano_12_p16_224", stem_patch=4, depth=1)
    tokens, grid = net.patch_embed(torch.rand(1, 1, 32, 32))
    assert tuple(grid) == (8, 8)
    assert tokens.shape[1] == net.patch_embed.num_patches == 64


def preactivation_logits(state: dict[str, torch.Tensor], x: torch.Tensor, num_groups: int):
    """He et al. 2016, Fig. 1 (b), straight from the weights: norm and ReLU come before weights."""

    def active(name: str, value: torch.Tensor) -> torch.Tensor:
        keys = ("running_mean", "running_var", "weight", "bias")
        return F.relu(F.batch_norm(value, *(state[f"{name}.{key}"] for key in keys)))

    x = F.conv2d(x, state["stem.conv.weight"], padding=1)
    for group in range(num_groups):
        for block in range(2):
            name, stride = f"stages.{group}.blocks.{block}", 2 if group and not block else 1
            start = active(f"{name}.norm1", x)
            if (shortcut := state.get(f"{name}.downsample.conv.weight")) is not None:
                x = F.conv2d(start, shortcut, stride=stride)
            y = F.conv2d(start, state[f"{name}.conv1.weight"], stride=stride, padding=1)
            y = active(f"{name}.norm2", y)
            x = x + F.conv2d(y, state[f"{name}.conv2.weight"], padding=1)
    pooled = active("norm", x).mean(dim=(2, 3))
    return F.linear(pooled, state["head.fc.weight"].flatten(1), state["head.fc.bias"])


@pytest.mark.parametrize("name", ["wrn_28_10", "preact_resnet18"])
def test_preactivation_networks_compute_what_the_paper_draws(name):
    net = build(name, layers=(2, 2, 2), widths=(8, 16, 24)).double()
    generator = torch.Generator().manual_seed(0)
    for value in net.state_dict().values():  # fresh norms would hide a missing one
        if value.is_floating_point():
            value.copy_(torch.rand(value.shape, generator=generator).mul(0.5).add(0.1))
    x = torch.rand(2, 1, 32, 32, generator=generator).double()
    assert net.forward_features(x).shape[2:] == (8, 8)
    torch.testing.assert_close(net(x), preactivation_logits(net.state_dict(), x, 3))


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
        ("tiny_vit", {"patch_size": 0}, r"model\.options\.patch_size: 0 must be at least 1"),
        ("vit_tiny_patch16_224", {"patch_size": 12}, r"patch_size: 12 does not divide"),
        ("tiny_xcit", {"stem_patch": 3}, r"model\.options\.stem_patch: 3 is not one of"),
        ("tiny_vit", {"stem_patch": 2}, r"model\.options\.stem_patch: 2 needs an XCiT"),
        ("resnet10t", {"pretrained": True}, r"model\.options\.pretrained: True is not an option"),
        ("tiny_xcit", {"patch_size": 3}, r"model\.options\.patch_size: 3 is not one of 2, 4, 8"),
        ("tiny_vit", {"num_classes": 3}, r"model\.options\.num_classes: 3 follows from the data"),
        ("resnet10t", {"in_chans": 3}, r"model\.options\.in_chans: 3 follows from the data"),
        ("resnet10t", {"depht": 3}, r"do not fit resnet10t.*depht"),
        ("tiny_vit", {"depth": -1}, r"model\.options\.depth: -1 must be at least 1"),
        ("tiny_vit", {"depth": 0}, r"model\.options\.depth: 0 must be at least 1"),
        ("wrn_28_10", {"widths": [8, -16, 8]}, r"model\.options\.widths: .* must be at least 1"),
        (
            "vit_tiny_patch16_224",
            {"drop_path_rate": 7},
            r"model\.options\.drop_path_rate: 7 is not a rate; it is in \[0, 1\)",
        ),
        ("resnet10t", {"drop_rate": -0.1}, r"model\.options\.drop_rate: -0\.1 is not a rate"),
        ("vit_tiny_patch16_224", {"mlp_ratio": float("nan")}, r"mlp_ratio: nan is not a finite"),
        ("vit_tiny_patch16_224", {"reg_tokens": -3}, r"reg_tokens: -3 must be at least 0"),
    ],
)
def test_options_that_do_not_fit_are_named(architecture, options, message):
    with pytest.raises(CasemateError, match=message):
        build(architecture, **options)
