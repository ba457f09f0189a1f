"""Pictures show the pixels they claim to show."""

import base64
import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from components.report.pictures import (
    amplification,
    perturbation,
    png_uri,
    spread_starts,
)


def pixels_of(uri: str) -> np.ndarray:
    head, _, body = uri.partition(",")
    assert head == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(body))))


@pytest.mark.parametrize("channels", [1, 3])
def test_png_holds_exactly_the_stored_levels(channels):
    levels = np.random.default_rng(0).integers(0, 256, (channels, 5, 7), dtype=np.uint8)
    back = pixels_of(png_uri(levels.astype(np.float32) / 255))
    assert np.array_equal(back, levels[0] if channels == 1 else levels.transpose(1, 2, 0))


def test_other_shapes_are_refused():
    with pytest.raises(ValueError, match="expected"):
        png_uri(np.zeros((2, 4, 4)))


@given(st.integers(1, 127), st.integers(0, 2**32 - 1))
def test_amplified_difference_fills_but_never_leaves_the_grey_scale(budget, seed):
    rng = np.random.default_rng(seed)
    clean = rng.random((2, 1, 4, 4), dtype=np.float32)
    signs = rng.choice(np.array([-1, 1], dtype=np.float32), clean.shape)
    adversarial = np.clip(clean + signs * np.float32(budget / 255), 0, 1)
    factor = amplification(clean, adversarial)
    shown = perturbation(clean, adversarial, factor=factor)
    assert shown.min() >= -1e-5
    assert shown.max() <= 1 + 1e-5
    more = perturbation(clean, adversarial, factor=factor + 1)
    assert more.min() < 0 or more.max() > 1


def test_the_factor_of_a_usual_budget_and_of_no_change():
    clean = np.full((1, 1, 2, 2), 0.5, dtype=np.float32)
    assert amplification(clean, clean + np.float32(8 / 255)) == 15  # 0.5 * 255 / 8 = 15.9
    assert amplification(clean, clean) == 1


@given(st.integers(1, 64), st.integers(1, 10))
def test_spread_starts_are_distinct_and_in_range(num_starts, count):
    chosen = spread_starts(tuple(range(num_starts)), count=count)
    assert len(set(chosen)) == len(chosen) == min(count, num_starts)
    assert all(0 <= i < num_starts for i in chosen)
