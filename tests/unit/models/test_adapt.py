"""Fitting weights to other sizes: equal where equality is due, untouched where nothing changes."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.models.beit import Beit
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from timm.models.xcit import Xcit

from components.core.errors import CasemateError
from components.models.adapt import (
    KERNEL_METHODS,
    fit_sizes,
    head_keys,
    resample_kernel,
    resample_positions,
    set_xcit_patch,
)

WIDTH = {"embed_dim": 16, "depth": 1, "num_heads": 2}


def scrambled(net: torch.nn.Module) -> torch.nn.Module:
    """Every weight and statistic moved off its initial value, in double precision."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for value in net.state_dict().values():
            if value.is_floating_point():
                value.add_(0.2 * torch.rand(value.shape, generator=generator))
    return net.double().eval()


def xcit(patch_size: int = 16) -> Xcit:
    return scrambled(Xcit(img_size=32, patch_size=patch_size, num_classes=5, **WIDTH))


def vit(
    side: int, patch: int, classes: int = 5, kind=VisionTransformer, **options
) -> torch.nn.Module:
    return scrambled(
        kind(img_size=side, patch_size=patch, num_classes=classes, **{**WIDTH, **options})
    )


def stem_by_hand(net: Xcit, x: torch.Tensor, strides: list[int]) -> torch.Tensor:
    """The stem written out: 3 x 3 convolution, batch norm, GELU between them."""
    for index, stride in enumerate(strides):
        conv, norm = net.patch_embed.proj[2 * index]
        x = F.conv2d(x if index == 0 else F.gelu(x), conv.weight, stride=stride, padding=1)
        centred = (x - norm.running_mean.view(-1, 1, 1)) / (
            norm.running_var + norm.eps
        ).sqrt().view(-1, 1, 1)
        x = centred * norm.weight.view(-1, 1, 1) + norm.bias.view(-1, 1, 1)
    return x


@pytest.mark.parametrize(
    ("stem", "patch", "strides"),
    [
        (16, 16, [2, 2, 2, 2]),
        (16, 8, [1, 2, 2, 2]),
        (16, 4, [1, 1, 2, 2]),
        (16, 2, [1, 1, 1, 2]),
        (8, 4, [1, 2, 2]),
        (8, 2, [1, 1, 2]),
    ],
)
def test_the_xcit_stem_keeps_its_weights_and_cuts_finer(stem, patch, strides):
    net, x = xcit(stem), torch.rand(2, 3, 32, 32, dtype=torch.float64)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    set_xcit_patch(net, patch)
    after = net.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    tokens, grid = net.patch_embed(x)
    assert grid == (32 // patch, 32 // patch)
    assert net.patch_embed.num_patches == tokens.shape[1] == (32 // patch) ** 2
    by_hand = stem_by_hand(net, x, strides).flatten(2).transpose(1, 2)
    torch.testing.assert_close(tokens, by_hand)
    assert net(x).shape == (2, 5)


def test_the_xcit_stem_can_go_back():
    net, x = xcit(), torch.rand(2, 3, 32, 32, dtype=torch.float64)
    logits = net(x)
    set_xcit_patch(net, 2)
    assert not torch.allclose(net(x), logits)
    set_xcit_patch(net, 16)
    assert torch.equal(net(x), logits)


@pytest.mark.parametrize(
    ("net", "patch", "message"),
    [
        (lambda: xcit(), 3, r"stem_patch: 3 is not one of \[1, 2, 4, 8, 16\]"),
        (lambda: xcit(8), 16, r"stem_patch: 16 is not one of \[1, 2, 4, 8\]"),
        (lambda: vit(16, 4), 2, "needs an XCiT, VisionTransformer is not one"),
    ],
)
def test_patches_that_a_stem_cannot_cut(net, patch, message):
    with pytest.raises(CasemateError, match=message):
        set_xcit_patch(net(), patch)


@given(st.sampled_from(KERNEL_METHODS), st.integers(1, 9), st.integers(1, 9))
def test_a_kernel_of_the_right_size_is_left_alone(method, height, width):
    kernel = torch.rand(2, 3, height, width)
    assert resample_kernel(kernel, (height, width), method=method) is kernel


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.integers(0, 9))
def test_a_summed_kernel_embeds_native_pixels_as_the_kernel_did_upsampled_ones(p, f, grid, seed):
    generator = torch.Generator().manual_seed(seed)
    kernel = torch.randn(4, 2, p * f, p * f, generator=generator, dtype=torch.float64)
    x = torch.rand(2, 2, p * grid, p * grid, generator=generator, dtype=torch.float64)
    upsampled = F.interpolate(x, scale_factor=f, mode="nearest")
    summed = resample_kernel(kernel, (p, p), method="sum")
    torch.testing.assert_close(
        F.conv2d(x, summed, stride=p), F.conv2d(upsampled, kernel, stride=p * f)
    )


def test_a_native_vit_equals_the_upsampled_one():
    """8 x 8 pixels at patch 2, or up-sampled fourfold at patch 8: the same logits."""
    large, small = vit(32, 8), vit(8, 2)
    fitted, resampled = fit_sizes(large.state_dict(), small, kernel_method="sum")
    assert resampled == {"patch_embed.proj.weight": ((16, 3, 8, 8), (16, 3, 2, 2))}
    small.load_state_dict(fitted)
    x = torch.rand(3, 3, 8, 8, dtype=torch.float64)
    upsampled = F.interpolate(x, scale_factor=4, mode="nearest")
    assert not torch.allclose(small(x)[0], small(x)[1])  # weights that see the image
    torch.testing.assert_close(small(x), large(upsampled))


def test_a_bilinear_kernel_averages_the_middle_of_every_cell():
    kernel = torch.rand(2, 3, 16, 16)
    resampled = resample_kernel(kernel, (4, 4))
    for row in range(4):
        for column in range(4):
            middle = kernel[..., 4 * row + 1 : 4 * row + 3, 4 * column + 1 : 4 * column + 3]
            torch.testing.assert_close(resampled[..., row, column], middle.mean(dim=(2, 3)))


def test_a_pi_kernel_embeds_enlarged_patches_as_before():
    """FlexiViT, section 3.4: enlarging patch and kernel changes no embedding."""
    kernel, patch = torch.rand(3, 2, 4, 4), torch.rand(1, 2, 4, 4)
    enlarged = F.interpolate(patch, size=(8, 8), mode="bicubic", antialias=True)
    resampled = resample_kernel(kernel, (8, 8), method="pi")
    torch.testing.assert_close(
        F.conv2d(enlarged, resampled), F.conv2d(patch, kernel), atol=1e-3, rtol=1e-3
    )


def test_kernels_that_cannot_be_summed():
    with pytest.raises(CasemateError, match="16 x 16 cannot be summed to 3 x 3"):
        resample_kernel(torch.rand(1, 1, 16, 16), (3, 3), method="sum")
    with pytest.raises(ValueError, match="method must be one of"):
        resample_kernel(torch.rand(1, 1, 16, 16), (4, 4), method="nearest")


@given(st.integers(2, 7), st.integers(2, 7), st.integers(2, 7), st.integers(0, 2))
def test_positions_keep_prefix_constants_and_mirror_images(old, rows, columns, prefix):
    table = torch.rand(1, prefix + old * old, 3)
    grid = (rows, columns)
    new = resample_positions(table, grid=grid, num_prefix=prefix)
    assert new.shape == (1, prefix + rows * columns, 3)
    assert torch.equal(new[:, :prefix], table[:, :prefix])
    mirrored = table[:, prefix:].unflatten(1, (old, old)).flip(2).flatten(1, 2)
    mirrored = resample_positions(mirrored, grid=grid, num_prefix=0).unflatten(1, grid)
    torch.testing.assert_close(mirrored.flip(2).flatten(1, 2), new[:, prefix:])
    same = resample_positions(torch.ones(1, old * old, 3), grid=grid, num_prefix=0)
    torch.testing.assert_close(same, torch.ones_like(same))


@pytest.mark.parametrize(
    ("kind", "options", "num_prefix"),
    [
        (VisionTransformer, {}, 1),
        (VisionTransformer, {"no_embed_class": True}, 0),
        (VisionTransformer, {"class_token": False, "global_pool": "avg"}, 0),
        (VisionTransformerDistilled, {}, 2),
    ],
)
def test_every_kind_of_vit_moves_to_another_grid(kind, options, num_prefix):
    old, same, new = (vit(side, 4, kind=kind, **options) for side in (16, 16, 24))
    state = old.state_dict()
    kept, resampled = fit_sizes(state, same)
    assert resampled == {}
    assert all(kept[name] is state[name] for name in state)

    fitted, resampled = fit_sizes(state, new)
    assert list(resampled) == ["pos_embed"]
    assert torch.equal(fitted["pos_embed"][:, :num_prefix], state["pos_embed"][:, :num_prefix])
    new.load_state_dict(fitted)
    assert new(torch.rand(2, 3, 24, 24, dtype=torch.float64)).shape == (2, 5)


def test_what_differs_in_more_than_size_is_left_alone():
    state = vit(16, 4).state_dict()
    for other in (vit(16, 4, embed_dim=24), vit(16, 4, in_chans=1), vit(24, 4, embed_dim=24)):
        fitted, resampled = fit_sizes(state, other)
        assert resampled == {}
        assert all(fitted[name] is state[name] for name in state)


def beit(side: int) -> Beit:
    return scrambled(
        Beit(
            img_size=side,
            patch_size=4,
            num_classes=5,
            use_rel_pos_bias=True,
            use_abs_pos_emb=False,
            **WIDTH,
        )
    )


def test_beit_tables_move_to_another_window():
    name = "blocks.0.attn.relative_position_bias_table"
    state = beit(16).state_dict()
    kept, resampled = fit_sizes(state, beit(16))
    assert resampled == {}
    assert kept[name] is state[name]

    larger = beit(24)
    fitted, resampled = fit_sizes(state, larger)
    assert resampled == {name: ((7 * 7 + 3, 2), (11 * 11 + 3, 2))}
    assert torch.equal(fitted[name][-3:].double(), state[name][-3:])  # class token's own entries
    torch.testing.assert_close(fitted[name][11 * 11 // 2].double(), state[name][7 * 7 // 2])  # self
    larger.load_state_dict(fitted)
    assert larger(torch.rand(1, 3, 24, 24, dtype=torch.float64)).shape == (1, 5)


def test_heads_are_found():
    assert head_keys(vit(16, 4)) == {"head.weight", "head.bias"}
    assert head_keys(vit(16, 4, kind=VisionTransformerDistilled)) == {
        f"{head}.{part}" for head in ("head", "head_dist") for part in ("weight", "bias")
    }
    assert head_keys(torch.nn.Linear(2, 2)) == frozenset()
