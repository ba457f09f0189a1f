"""Column masks and the blackening of everything outside them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from components.data.ablation import Ablations, ablate, column_mask, column_starts


@st.composite
def bands(draw):
    width = draw(st.integers(1, 20))
    return width, draw(st.integers(0, width - 1)), draw(st.integers(1, width))


@given(bands())
def test_mask_keeps_the_wrapped_band(case):
    width, start, band = case
    kept = {(start + offset) % width for offset in range(band)}
    mask = column_mask(width, start, band)
    assert mask.dtype == torch.bool
    assert {i for i in range(width) if mask[i]} == kept


def test_starts_run_below_the_width():
    assert column_starts(28, 7) == (0, 7, 14, 21)
    assert column_starts(9, 2) == (0, 2, 4, 6, 8)  # the last band wraps when it is wide
    assert len(column_starts(224, 10)) == 23


@pytest.mark.parametrize("stride", [0, -1, 10])
def test_impossible_strides_are_refused(stride):
    with pytest.raises(ValueError, match="stride"):
        column_starts(9, stride)


@pytest.mark.parametrize(("start", "band"), [(0, 0), (0, 10), (9, 1), (-1, 1)])
def test_impossible_bands_are_refused(start, band):
    with pytest.raises(ValueError, match="must be in"):
        column_mask(9, start, band)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 0.7])
def test_hidden_pixels_cannot_come_through(poison):
    images = torch.rand(2, 3, 4, 6)
    visible = column_mask(6, 5, 2)  # columns 5 and 0
    expected = ablate(images, visible)
    attacked = images.clone()
    attacked[..., 1:5] = poison
    assert torch.equal(ablate(attacked, visible), expected)
    assert torch.equal(expected[..., [5, 0]], images[..., [5, 0]])
    assert (expected[..., 1:5] == 0).all()


def test_mask_shapes_agree():
    images = torch.rand(3, 2, 4, 6)
    row = column_mask(6, 2, 3)
    expected = ablate(images, row)
    assert torch.equal(ablate(images, row.expand(4, 6)), expected)
    assert torch.equal(ablate(images, row.expand(3, 4, 6)), expected)


def test_each_image_gets_its_own_mask():
    images = torch.rand(2, 3, 4, 6) + 0.1
    visible = torch.stack([column_mask(6, start, 1).expand(4, 6) for start in (1, 4)])
    result = ablate(images, visible)
    assert (result[0, :, :, 1] > 0).all()
    assert (result[1, :, :, 4] > 0).all()
    assert (result > 0).sum() == 2 * 3 * 4


def test_float_masks_are_refused():
    with pytest.raises(ValueError, match="bool"):
        ablate(torch.rand(1, 1, 2, 2), torch.ones(2))


def test_nearest_upsampling_commutes_with_ablation():
    images = torch.rand(2, 3, 8, 8)
    visible = column_mask(8, 6, 4)
    grow = torch.nn.Upsample(scale_factor=7, mode="nearest")
    assert torch.equal(
        grow(ablate(images, visible)), ablate(grow(images), visible.repeat_interleave(7))
    )


@pytest.mark.parametrize("kind", ["columns", "rows", "blocks", "both"])
def test_masks_pixel_by_pixel(kind):
    """From the definition; some of them alone are the same as among all."""
    height, width, band, stride = 5, 7, 3, 2
    ablations = Ablations(kind=kind, image_size=(height, width), band=band, stride=stride)

    def shows(start, line, side):
        return start is None or (line - start) % side < band

    tops, lefts = range(0, height, stride), range(0, width, stride)
    corners = {
        "columns": [(None, left) for left in lefts],
        "rows": [(top, None) for top in tops],
        "blocks": [(top, left) for top in tops for left in lefts],
    }
    corners["both"] = corners["columns"] + corners["rows"]
    expected = [
        [[shows(top, i, height) and shows(left, j, width) for j in range(width)]
         for i in range(height)]
        for top, left in corners[kind]
    ]  # fmt: skip
    assert ablations.masks().tolist() == expected
    assert len(ablations) == len(expected)
    some = torch.tensor([len(expected) - 1, 0, 1, 1])
    assert ablations.masks(some).tolist() == [expected[k] for k in some]
