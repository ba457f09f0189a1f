"""Counting touched bands: published values, brute force, and the seam."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.certify.ablations import num_touched, touched_by


@st.composite
def shapes(draw, max_width=28):
    width = draw(st.integers(1, max_width))
    side = st.integers(1, width)
    return {
        "image_width": width,
        "band": draw(side),
        "stride": draw(side),
        "patch": draw(side),
    }


def touched_sets(*, image_width, band, stride, patch):
    """For each patch position the starts of the bands it meets, by sets of columns."""
    bands = {
        start: {(start + i) % image_width for i in range(band)}
        for start in range(0, image_width, stride)
    }
    return [
        {start for start, columns in bands.items() if columns & set(range(left, left + patch))}
        for left in range(image_width - patch + 1)
    ]


@pytest.mark.parametrize(
    ("width", "band", "stride", "patch", "expected"),
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
def test_published_values(width, band, stride, patch, expected):
    assert num_touched(image_width=width, band=band, stride=stride, patch=patch) == expected


@given(shapes())
def test_count_equals_brute_force(shape):
    assert num_touched(**shape) == max(map(len, touched_sets(**shape)))


@given(shapes(max_width=14))
def test_positions_name_the_very_bands(shape):
    touched = touched_by(**shape)
    expected = touched_sets(**shape)
    assert touched.shape == (len(expected), -(-shape["image_width"] // shape["stride"]))
    for row, starts in zip(touched, expected, strict=True):
        assert {k * shape["stride"] for k in range(len(row)) if row[k]} == starts


def test_every_small_shape_agrees_with_the_closed_form():
    # num_touched asserts the equality itself; this walks all shapes up to width 10.
    for width in range(1, 11):
        sides = range(1, width + 1)
        for band in sides:
            for stride in sides:
                for patch in sides:
                    num_touched(image_width=width, band=band, stride=stride, patch=patch)


def test_the_seam_witness():
    # A patch on columns 4..35 meets the bands at 210, 220, 0, 10, 20, 30.
    touched = touched_by(image_width=224, band=19, stride=10, patch=32)
    assert [10 * k for k in range(23) if touched[4, k]] == [0, 10, 20, 30, 210, 220]


@pytest.mark.parametrize("wrong", [{"patch": 0}, {"patch": 10}, {"band": 0}, {"stride": 10}])
def test_impossible_shapes_are_refused(wrong):
    with pytest.raises(ValueError, match="must be in"):
        num_touched(**({"image_width": 9, "band": 2, "stride": 2, "patch": 1} | wrong))


def test_the_shared_array_cannot_be_changed():
    touched = touched_by(image_width=9, band=2, stride=2, patch=1)
    with pytest.raises(ValueError, match="read-only"):
        touched[0, 0] = True
