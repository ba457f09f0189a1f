"""Size and channels: exact 8-bit arithmetic, centred, or a clear refusal."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torchvision import transforms

from components.core.errors import CasemateError
from components.data.fitting import Fitting, resize_square, squash


def random_pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


@given(
    height=st.integers(1, 9), width=st.integers(1, 9), spare=st.integers(0, 5), grey=st.booleans()
)
def test_padding_keeps_every_pixel_and_centres_it(height, width, spare, grey):
    pixels = random_pixels(height, width, 1 if grey else 3) | 1  # no black inside
    size = max(height, width) + spare
    framed = Fitting(size, "pad").apply(pixels, item_id="x")
    assert framed.shape == (size, size, pixels.shape[2])
    rows, columns = np.nonzero(framed.any(axis=2))
    box = framed[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
    assert np.array_equal(box, pixels)
    above, below = rows.min(), size - 1 - rows.max()
    assert below - above in (0, 1)


def test_pad_refuses_to_shrink():
    with pytest.raises(CasemateError, match=r"mnist5k-00003 \(28x28\)") as caught:
        Fitting(16, "pad").apply(random_pixels(28, 28, 1), item_id="mnist5k-00003")
    assert caught.value.key == "data.image_size"


def test_halving_is_the_antialiased_triangle_filter():
    """Factor 2: weights 1/8, 3/8, 3/8, 1/8 per axis, with the cut-off tails renormalised."""
    pixels = random_pixels(8, 8, 1)
    weights = np.zeros((4, 8))
    for row in range(4):
        for tap, weight in zip(range(2 * row - 1, 2 * row + 3), (1, 3, 3, 1), strict=True):
            if 0 <= tap < 8:
                weights[row, tap] = weight
    weights /= weights.sum(axis=1, keepdims=True)
    exact = weights @ pixels[..., 0].astype(float) @ weights.T
    small = Fitting(4, "resize").apply(pixels, item_id="x")[..., 0]
    # two passes, each rounded to a byte: at most 1/2 + 1/2 away
    assert np.abs(small - exact).max() <= 1.0
    nearest = pixels[::2, ::2, 0]
    assert np.abs(small.astype(int) - nearest).max() > 10


def test_resizing_crops_the_longer_side_and_squeezes_nothing():
    pixels = np.zeros((4, 10, 3), dtype=np.uint8)
    pixels[:, 3:7] = 200  # the central square
    scaled = Fitting(6, "resize").apply(pixels, item_id="x")
    assert scaled.shape == (6, 6, 3)
    assert (scaled == 200).all()


def test_equal_size_changes_nothing():
    pixels = random_pixels(7, 7, 3)
    for fit in ("pad", "resize"):
        assert np.array_equal(Fitting(7, fit).apply(pixels, item_id="x"), pixels)
    assert np.array_equal(Fitting().apply(pixels, item_id="x"), pixels)


def test_channels_change_by_repetition_and_by_luma():
    grey = random_pixels(5, 5, 1)
    colour = Fitting(channels=3).apply(grey, item_id="x")
    assert all(np.array_equal(colour[..., c], grey[..., 0]) for c in range(3))
    assert np.array_equal(Fitting(channels=1).apply(colour, item_id="x"), grey)
    rgb = random_pixels(5, 5, 3)
    luma = rgb @ np.array([0.299, 0.587, 0.114])  # ITU-R BT.601
    assert np.abs(Fitting(channels=1).apply(rgb, item_id="x")[..., 0] - luma).max() <= 0.51


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"image_size": 0}, "data.image_size"),
        ({"fit": "stretch"}, "data.fit"),
        ({"channels": 2}, "data.channels"),
    ],
)
def test_bad_settings_are_named(settings, key):
    with pytest.raises(CasemateError) as caught:
        Fitting(**settings)
    assert caught.value.key == key


def test_wrong_arrays_are_our_own_mistake():
    with pytest.raises(ValueError, match="float64"):
        Fitting().apply(np.zeros((4, 4, 3)), item_id="x")


# -- crop


@given(
    height=st.integers(5, 40), width=st.integers(5, 40), size=st.integers(4, 20), grey=st.booleans()
)
def test_cropping_is_what_published_evaluations_do(height, width, size, grey):
    """The oracle is the transform that published ImageNet accuracies were measured with."""
    pixels = random_pixels(height, width, 1 if grey else 3)
    image = Image.fromarray(pixels[..., 0] if grey else pixels)
    shorter = math.floor(size / 0.875)
    oracle = transforms.Compose(
        [
            transforms.Resize(shorter, transforms.InterpolationMode.BICUBIC),
            transforms.CenterCrop(size),
        ]
    )
    expected = np.asarray(oracle(image)).reshape(size, size, -1)
    assert np.array_equal(
        Fitting(size, "crop", resize=shorter).apply(pixels, item_id="x"), expected
    )


def test_cropping_alone_cuts_the_longer_side_only():
    wide = np.zeros((8, 32, 3), dtype=np.uint8)
    wide[:, 12:20] = 200  # the central square
    assert (Fitting(8, "crop").apply(wide, item_id="x") == 200).all()
    framed = np.zeros((16, 16, 1), dtype=np.uint8)
    framed[4:12, 4:12] = 200
    assert (Fitting(8, "crop", resize=16).apply(framed, item_id="x") == 200).all()


def test_training_images_may_be_stored_larger():
    wide = random_pixels(20, 40, 3)
    larger = Fitting(8, "crop", resize=10).enlarged(12)
    assert larger == Fitting(12, "crop")  # all of the shorter side is kept
    assert larger.apply(wide, item_id="x").shape == (12, 12, 3)
    assert Fitting(8, "resize", 1).enlarged(12) == Fitting(12, "resize", 1)
    for fitting, remedy in (
        (Fitting(8, "pad"), "needs data.fit"),
        (Fitting(None, "resize"), "needs data.fit"),
        (Fitting(16, "resize"), "below data.image_size 16"),
    ):
        with pytest.raises(CasemateError, match=remedy) as caught:
            fitting.enlarged(12)
        assert caught.value.key == "data.train_size"


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"fit": "crop"}, "data.fit"),
        ({"image_size": 8, "fit": "resize", "resize": 9}, "data.resize"),
        ({"image_size": 8, "fit": "crop", "resize": 7}, "data.resize"),
    ],
)
def test_crops_that_cannot_be_are_named(settings, key):
    with pytest.raises(CasemateError) as caught:
        Fitting(**settings)
    assert caught.value.key == key


def test_squashed_images_keep_all_and_lose_their_aspect():
    wide = random_pixels(20, 40, 3)
    wide[:, 20:] = 255
    squashed = Fitting(10, "squash").apply(wide, item_id="x")
    assert squashed.shape == (10, 10, 3)
    assert (squashed[:, 6:] == 255).all()  # the right half is still there
    square = random_pixels(20, 20, 1)
    for size in (10, 20, 30):
        assert np.array_equal(squash(square, size=size), resize_square(square, size=size))
