"""Which tokens an ablation keeps, and that nothing outside it reaches the logits."""

from collections import Counter
from functools import cache

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from components.data.ablation import column_mask
from components.models.pixels import PixelModel
from components.models.spec import ModelSpec
from components.models.tokens import kept_indices, visible_tokens
from tests.unit.networks import scattered


def axis_masks(side, band):
    return torch.stack([column_mask(side, start, band) for start in range(side)])


def token_columns(start, band, *, side=224, patch=16):
    """Brute force: the token columns of the pixels start, ..., start + band - 1 modulo the side."""
    return {(start + offset) % side // patch for offset in range(band)}


def counted(keep):
    return dict(Counter(keep.sum(dim=1).tolist()))


@pytest.mark.parametrize(
    ("band", "starts_by_tokens"),
    [(19, {28: 196, 42: 28}), (25, {28: 112, 42: 112}), (37, {42: 168, 56: 56})],
)
def test_published_counts_of_columns(band, starts_by_tokens):
    """224 pixels, patch 16, stride 1."""
    visible = axis_masks(224, band)[:, None, :].expand(-1, 224, -1)
    assert counted(visible_tokens(visible, (16, 16))) == starts_by_tokens


def test_published_counts_of_grown_columns():
    """32 pixels grown 7 times to 224, band 4."""
    visible = axis_masks(32, 4).repeat_interleave(7, dim=1)[:, None, :].expand(-1, 224, -1)
    assert counted(visible_tokens(visible, (16, 16))) == {28: 10, 42: 22}


def test_published_counts_of_squares():
    """Squares of side 75: rows and columns of cells factor, so one axis gives all 224^2 starts."""
    axis = axis_masks(224, 75)
    per_start = visible_tokens(axis[:, None, :].expand(-1, 16, -1), (16, 16)).sum(dim=1)
    assert dict(Counter(torch.outer(per_start, per_start).flatten().tolist())) == {
        25: 7056,
        30: 23520,
        36: 19600,
    }
    for top, left in [(0, 0), (3, 200), (223, 100), (150, 223)]:  # that they factor
        square = axis[top][:, None] & axis[left][None, :]
        keep = visible_tokens(square[None], (16, 16))
        assert keep.sum() == per_start[top] * per_start[left]


@pytest.mark.parametrize(
    ("start", "columns"), [(0, {0, 1}), (13, {0, 1}), (14, {0, 1, 2}), (206, {0, 12, 13})]
)
def test_published_token_columns(start, columns):
    visible = column_mask(224, start, 19).expand(1, 224, 224)
    kept = kept_indices(visible_tokens(visible, (16, 16)))[0]
    assert {index % 14 for index in kept.tolist()} == columns == token_columns(start, 19)
    assert kept.tolist() == sorted(kept.tolist())


NETWORKS = {
    "vit": ("vit_tiny_patch16_224", {}),
    "beit": ("beit_base_patch16_224", {}),
    "eva": ("eva02_tiny_patch14_224", {}),
}


@cache
def cifar_model(network, policy):
    """32 pixels grown to 224 with patch 16: the cells do not end where native pixels end."""
    architecture, options = NETWORKS[network]
    small = {"patch_size": 16, "embed_dim": 8, "depth": 1, "num_heads": 2}
    spec = ModelSpec(
        architecture,
        num_classes=5,
        channels=3,
        image_size=32,
        upsample=224,
        mean=(0.4, 0.5, 0.6),
        std=(0.2, 0.3, 0.25),
        token_policy=policy,
        options={**small, **options},
    )
    return scattered(lambda: PixelModel(spec), by=0.2)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 31), st.integers(1, 32))
@example(30, 4)  # wraps around the right edge
@example(0, 32)  # everything is visible
def test_kept_tokens_of_grown_images_are_those_of_brute_force(start, band):
    visible = column_mask(32, start, band).expand(32, 32)
    columns = token_columns(7 * start, 7 * band)
    for network in NETWORKS:
        assert cifar_model(network, "drop").num_kept(visible[None]) == 14 * len(columns)


@settings(max_examples=40, deadline=None)
@given(
    network=st.sampled_from(sorted(NETWORKS)),
    policy=st.sampled_from(["drop", "mask"]),
    start=st.integers(0, 31),
    band=st.integers(1, 31),
    poison=st.sampled_from([0.0, 1.0, float("nan"), float("inf")]),
    seed=st.integers(0, 2**32 - 1),
)
@example(network="vit", policy="drop", start=30, band=4, poison=float("nan"), seed=0)
@example(network="beit", policy="drop", start=30, band=4, poison=float("nan"), seed=0)
@example(network="eva", policy="drop", start=30, band=4, poison=float("nan"), seed=0)
def test_hidden_pixels_never_reach_the_logits(network, policy, start, band, poison, seed):
    model = cifar_model(network, policy)
    generator = torch.Generator().manual_seed(seed)
    image, other = torch.rand(2, 3, 32, 32, generator=generator)
    visible = column_mask(32, start, band).expand(32, 32)
    attacked = torch.where(visible, image, torch.where(other < 0.5, other, poison))
    logits = model.forward_ablated(image[None], visible)
    assert torch.equal(model.forward_ablated(attacked[None], visible), logits)
    seen = torch.where(visible, 1 - image, image)
    assert not torch.equal(
        model.forward_ablated(seen[None], visible), logits
    )  # what is visible does matter
