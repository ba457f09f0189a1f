"""Counting touched ablations: published values, brute force, the seam, and the other formulas."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.certify.patch.ablations import (
    _closed_form,
    max_touched,
    num_touched,
    touched_bands,
    touched_sets,
)
from components.core.errors import CasemateError
from components.data.ablation import KINDS, Ablations


@st.composite
def shapes(draw, max_size=28):
    size = draw(st.integers(1, max_size))
    side = st.integers(1, size)
    return size, {"width": draw(side), "stride": draw(side), "patch": draw(side)}


def touched_starts(size, *, width, stride, patch):
    """For each patch position the starts of the bands it meets, by sets of pixels."""
    bands = {q: {(q + i) % size for i in range(width)} for q in range(0, size, stride)}
    return [
        {start for start, pixels in bands.items() if pixels & set(range(p, p + patch))}
        for p in range(size - patch + 1)
    ]


def touched_masks(ablations, patch):
    """For each patch position the (K,) ablations whose mask shows one of its pixels."""
    masks = ablations.masks().numpy()
    height, width = ablations.image_size
    tall, wide = patch
    return [
        masks[:, top : top + tall, left : left + wide].any(axis=(1, 2))
        for top in range(height - tall + 1)
        for left in range(width - wide + 1)
    ]


@pytest.mark.parametrize(
    ("size", "width", "stride", "patch", "expected"),
    [
        (224, 19, 1, 32, 50),
        (224, 19, 5, 32, 11),
        (224, 19, 7, 32, 8),
        (224, 19, 8, 32, 7),
        (224, 19, 10, 23, 5),
        (224, 19, 10, 32, 6),
        (224, 19, 10, 39, 7),
        (224, 25, 10, 23, 6),
        (224, 37, 5, 39, 16),
        (224, 75, 18, 32, 7),
        (224, 19, 20, 32, 4),
        (32, 4, 1, 2, 5),
        (32, 4, 1, 4, 7),
        (32, 4, 5, 2, 2),
        (32, 4, 8, 5, 1),
        (9, 2, 2, 1, 2),
    ],
)
def test_published_values(size, width, stride, patch, expected):
    assert max_touched(size, width=width, stride=stride, patch=patch) == expected


@given(shapes())
def test_count_equals_brute_force(drawn):
    size, shape = drawn
    assert max_touched(size, **shape) == max(map(len, touched_starts(size, **shape)))


@given(shapes(max_size=14))
def test_positions_name_the_very_bands(drawn):
    size, shape = drawn
    touched, expected = touched_bands(size, **shape), touched_starts(size, **shape)
    assert touched.shape == (len(expected), -(-size // shape["stride"]))
    for row, starts in zip(touched, expected, strict=True):
        assert {k * shape["stride"] for k in range(len(row)) if row[k]} == starts


def test_every_small_shape_equals_brute_force():
    for size in range(1, 10):
        for width, stride, patch in product(range(1, size + 1), repeat=3):
            shape = {"width": width, "stride": stride, "patch": patch}
            assert max_touched(size, **shape) == max(map(len, touched_starts(size, **shape)))


def test_all_shapes_up_to_28_pixels():
    """164,836 shapes by direct count of starts; 24,145 of them the published count misses."""
    shapes = too_small = 0
    for size in range(1, 29):
        patch = np.arange(1, size + 1)
        first, last = np.meshgrid(np.arange(size), patch - 1, indexing="ij")
        last = first + last  # (P, M): patches by first and last pixel, those inside the image
        inside = last < size
        for width, stride in product(range(1, size + 1), repeat=2):
            starts = np.arange(0, size, stride)
            reach = (last[None] - starts[:, None, None]) % size  # from a band's start to the end
            met = reach < (last - first + width)[None]
            exact = np.where(inside, met.sum(axis=0), 0).max(axis=0)
            closed = [_closed_form(size, width=width, stride=stride, patch=int(m)) for m in patch]
            assert exact.tolist() == closed
            reference = np.minimum(len(starts), -(-(patch + width - 1) // stride))
            missed = int((reference < exact).sum())
            assert not missed or size % stride
            shapes, too_small = shapes + size, too_small + missed
    assert (shapes, too_small) == (164_836, 24_145)


@st.composite
def ablation_sets(draw, max_side=7):
    image_size = draw(st.integers(1, max_side)), draw(st.integers(1, max_side))
    side = st.integers(1, min(image_size))
    kind = draw(st.sampled_from(KINDS))
    ablations = Ablations(kind=kind, image_size=image_size, band=draw(side), stride=draw(side))
    return ablations, tuple(draw(st.integers(1, n)) for n in image_size)


@settings(max_examples=60, deadline=None)
@given(ablation_sets())
def test_masks_keep_the_wrapped_pixels_in_the_order_of_votes(drawn):
    ablations, _ = drawn
    (height, width), band = ablations.image_size, ablations.band
    down, across = (range(0, side, ablations.stride) for side in (height, width))

    def run(start, side):
        return {(start + i) % side for i in range(band)}

    columns = [(set(range(height)), run(q, width)) for q in across]
    rows = [(run(q, height), set(range(width))) for q in down]
    blocks = [(run(i, height), run(j, width)) for i, j in product(down, across)]
    of_kind = {"columns": columns, "rows": rows, "blocks": blocks, "both": [*columns, *rows]}
    for mask, (kept_rows, kept_columns) in zip(
        ablations.masks().numpy(), of_kind[ablations.kind], strict=True
    ):
        assert set(zip(*map(list, np.nonzero(mask)), strict=True)) == set(
            product(kept_rows, kept_columns)
        )


@settings(max_examples=150, deadline=None)
@given(ablation_sets())
def test_rectangles_on_every_kind_equal_the_masks_themselves(drawn):
    ablations, patch = drawn
    expected = touched_masks(ablations, patch)
    assert len(ablations) == len(ablations.masks())
    assert num_touched(ablations, patch) == max(int(touched.sum()) for touched in expected)
    # Weights that tell every ablation apart: sums agree only if the sets do.
    weights = 2 ** np.arange(len(ablations)) if len(ablations) < 50 else None
    if weights is not None:
        found = touched_sets(ablations, patch)
        sums = np.broadcast_to(found.weight_inside(weights), found.sizes.shape)
        assert {int(s) for s in sums.ravel()} == {int(weights @ touched) for touched in expected}
        assert found.sizes.max() == num_touched(ablations, patch)


def test_the_seam_witness():
    # A patch on columns 4..35 meets the bands at 210, 220, 0, 10, 20, 30.
    touched = touched_bands(224, width=19, stride=10, patch=32)
    assert [10 * k for k in range(23) if touched[4, k]] == [0, 10, 20, 30, 210, 220]


def _columns(band, stride, kind="columns"):
    return Ablations(kind=kind, image_size=(224, 224), band=band, stride=stride)


@pytest.mark.parametrize(
    ("band", "stride", "reference", "exact"),
    [
        (19, 1, [41, 50, 57], [41, 50, 57]),
        (37, 1, [59, 68, 75], [59, 68, 75]),
        (19, 5, [9, 10, 12], [9, 11, 12]),
        (37, 5, [12, 14, 15], [12, 14, 16]),
        (19, 10, [5, 5, 6], [5, 6, 7]),
        (25, 10, [5, 6, 7], [6, 7, 7]),
        (37, 10, [6, 7, 8], [7, 8, 9]),
    ],
)
def test_the_three_formulas_are_told_apart(band, stride, reference, exact):
    ablations, sizes = _columns(band, stride), (23, 32, 39)
    found = [num_touched(ablations, m, delta_rule="paper_reference") for m in sizes]
    assert found == reference
    assert [num_touched(ablations, m) for m in sizes] == exact
    printed = [-(-(m + stride - 1) // stride) for m in sizes]  # as in the paper's appendix
    assert all(
        p < e for p, e in zip(printed, exact, strict=True)
    )  # b is missing: too small everywhere


def test_blocks_square_the_reference_and_the_exact_count():
    for stride, reference, exact in [(10, 121, 144), (18, 36, 49), (7, 256, 256), (16, 49, 49)]:
        blocks = _columns(75, stride, "blocks")
        assert num_touched(blocks, 32, delta_rule="paper_reference") == reference
        assert num_touched(blocks, 32) == exact
    assert num_touched(_columns(75, 1, "blocks"), 32) == (32 + 75 - 1) ** 2


def test_the_reference_is_too_small_only_where_the_stride_does_not_divide_the_side():
    too_small = []
    for size in range(1, 10):
        for band, stride, m in product(range(1, size + 1), repeat=3):
            reference = min(-(-size // stride), -(-(m + band - 1) // stride))
            if reference < max_touched(size, width=band, stride=stride, patch=m):
                too_small.append(size % stride)
    assert too_small
    assert all(too_small)


@pytest.mark.parametrize("wrong", [{"patch": 0}, {"patch": 10}, {"width": 0}, {"stride": 10}])
def test_impossible_shapes_are_refused(wrong):
    with pytest.raises(ValueError, match="must be in"):
        max_touched(9, **({"width": 2, "stride": 2, "patch": 1} | wrong))


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        *((name, 9, "is larger than the image (8)") for name in ("band", "stride")),
        *((name, 0, "is not a whole number above 0") for name in ("band", "stride")),
        ("kind", "waves", "is not one of columns, rows, blocks, both"),
    ],
)
def test_what_a_user_can_mend_is_said_in_one_line(name, value, remedy):
    good = {"kind": "blocks", "image_size": (8, 12), "band": 2, "stride": 1}
    with pytest.raises(CasemateError) as caught:
        Ablations(**good | {name: value})
    assert str(caught.value) == f"certify.{name}: {value} {remedy}"


@pytest.mark.parametrize("patch", [9, 0, (9, 1), (1, 13)])
def test_patches_beyond_the_image_are_refused_in_one_line(patch):
    ablations = Ablations(kind="columns", image_size=(8, 12), band=2, stride=1)
    with pytest.raises(CasemateError, match=r"does not fit into the image, 8x12 pixels"):
        num_touched(ablations, patch)
    with pytest.raises(CasemateError, match="delta_rule: printed is not one of"):
        num_touched(ablations, 2, delta_rule="printed")


def test_the_shared_array_cannot_be_changed():
    touched = touched_bands(9, width=2, stride=2, patch=1)
    with pytest.raises(ValueError, match="read-only"):
        touched[0, 0] = True
