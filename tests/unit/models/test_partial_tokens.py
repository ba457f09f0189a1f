"""Tokens from sums of lines: equal to ablated images, and blind to what is hidden."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.data.ablation import Ablations
from components.models.partial_tokens import (
    ALONE,
    CutStem,
    PartialTokens,
    can_embed_cuts,
    cut_cells,
)
from components.models.tokens import forward_kept, kept_indices, visible_tokens
from tests.unit.models.conftest import make_model
from tests.unit.models.test_tokens_variants import VARIANTS, variant

SETTINGS = [  # cells of 4: bands inside a cell, of one cell, over several, all but a part of one
    *(("columns", band) for band in (1, 3, 4, 5, 9, 14, 16)),
    *(("rows", band) for band in (2, 5)),
    *(("blocks", band) for band in (3, 6)),
]


def fast_logits(net, images, visible, *, mean, std):
    """One row per image and mask; whole patterns first, as a plan would list them."""
    keep = visible_tokens(visible, (4, 4))
    cells = cut_cells(visible, keep, (4, 4))
    numbers = sorted(set(cells.pattern.flatten().tolist()) - {ALONE} | {0})
    tokens = PartialTokens(CutStem(net, mean=mean, std=std, patterns=numbers), images)
    return torch.stack([
        tokens.logits(cells, image=torch.full((len(visible),), row), visible=visible)
        for row in range(len(images))
    ])  # fmt: skip


def equal_counts(masks):
    counts = visible_tokens(masks, (4, 4)).sum(dim=1)
    return [masks[counts == count] for count in counts.unique()]


@pytest.mark.parametrize(("kind", "band"), SETTINGS)
@torch.no_grad()
def test_logits_are_those_of_ablated_images(images, kind, band):
    stride = 3 if kind == "blocks" else 1
    ablations = Ablations(kind=kind, image_size=(16, 16), band=band, stride=stride)
    for dtype, bound in ((torch.float64, 1e-11), (torch.float32, 1e-4)):
        model = make_model(token_policy="drop").to(dtype)
        pixels = images[:2].to(dtype)
        for masks in equal_counts(ablations.masks()):
            found = fast_logits(model.net, pixels, masks, mean=model.mean, std=model.std)
            for row, image in enumerate(pixels):
                expected = model.forward_ablated(image.expand(len(masks), -1, -1, -1), masks)
                assert (found[row] - expected).abs().max() < bound


@pytest.mark.parametrize("label", VARIANTS)
@torch.no_grad()
def test_every_droppable_network(label):
    net = variant(label)
    assert can_embed_cuts(net)
    zero, one = torch.zeros(1, 3, 1, 1).double(), torch.ones(1, 3, 1, 1).double()
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(1, 3, 16, 16, generator=generator, dtype=torch.float64)
    masks = Ablations(kind="blocks", image_size=(16, 16), band=6, stride=5).masks()
    masks = equal_counts(masks)[0]
    kept = kept_indices(visible_tokens(masks, (4, 4)))
    expected = forward_kept(net, torch.where(masks[:, None], images, zero), kept)
    found = fast_logits(net, images, masks, mean=zero, std=one)[0]
    bound = 1e-6 if getattr(net, "rope_mixed", False) else 1e-10  # rotations in single precision
    assert (found - expected).abs().max() < bound * max(1, expected.abs().max())


@settings(max_examples=15, deadline=None)
@given(
    kind=st.sampled_from(["columns", "rows", "blocks"]),
    band=st.integers(1, 14),
    start=st.integers(0, 15),
    filler=st.sampled_from([0.0, 1.0, float("nan"), float("inf"), "noise"]),
)
@torch.no_grad()
def test_hidden_pixels_reach_no_bit_of_the_logits(kind, band, start, filler):
    """Differences of prefix sums fail here: their rounding remembers hidden lines."""
    model = make_model(token_policy="drop")
    ablations = Ablations(kind=kind, image_size=(16, 16), band=band, stride=1)
    visible = ablations.masks()[start * (17 if kind == "blocks" else 1)][None]
    generator = torch.Generator().manual_seed(start)
    image = torch.rand(1, 3, 16, 16, generator=generator)
    noise = torch.rand(1, 3, 16, 16, generator=generator)
    other = noise if filler == "noise" else torch.full_like(image, filler)
    attacked = torch.where(visible[:, None], image, other)
    clean, changed = (
        fast_logits(model.net, x, visible, mean=model.mean, std=model.std)
        for x in (image, attacked)
    )
    assert torch.isfinite(clean).all()
    assert torch.equal(clean, changed)


def test_patterns_name_the_visible_lines_of_a_cell():
    shown = torch.zeros(8, 4, 4, dtype=torch.bool)
    shown[0] = True
    shown[1, :, :1] = True  # first columns
    shown[2, :, :3] = True
    shown[3, :, 1:] = True  # last columns
    shown[4, :, 3:] = True
    shown[5, :2] = True  # first rows
    shown[6, 3:] = True  # last rows
    shown[7, :2, :2] = True  # a corner
    cells = cut_cells(shown, torch.ones(8, 1, dtype=torch.bool), (4, 4))
    assert cells.pattern.flatten().tolist() == [0, 1, 3, 4, 6, 6 + 2, 6 + 6, ALONE]
    inner = torch.zeros(3, 4, 4, dtype=torch.bool)
    inner[0, :, 1:3] = True  # neither end
    inner[1, :, [0, 3]] = True  # both ends
    inner[2] = torch.eye(4, dtype=torch.bool)  # no band at all
    cells = cut_cells(inner, torch.ones(3, 1, dtype=torch.bool), (4, 4))
    assert (cells.pattern == ALONE).all()


def test_a_stem_that_somebody_watches_is_left_alone():
    net = make_model(token_policy="drop").net
    assert can_embed_cuts(net)
    handle = net.patch_embed.proj.register_forward_hook(lambda *_: None)
    assert not can_embed_cuts(net)
    handle.remove()
    assert can_embed_cuts(net)
    assert not can_embed_cuts(torch.nn.Linear(2, 2))
