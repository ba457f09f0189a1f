"""Random rectangles for resized crops and random erasing."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from components.core.types import FloatArray, IntArray

ATTEMPTS = 10  # as in torchvision's resized crop and timm's random erasing
UNIFORMS = 2 * ATTEMPTS + 2  # an area and an aspect per attempt, then the corner


class Boxes(NamedTuple):
    """One rectangle per row in whole pixels; undefined where `found` is False."""

    places: IntArray  # (B, 4): top, left, height, width
    found: NDArray[np.bool_]


def random_boxes(
    uniforms: FloatArray,
    *,
    image: tuple[int, int],
    largest: tuple[int, int],
    smallest: int,
    area: tuple[float, float],
    ratio: tuple[float, float],
) -> Boxes:
    """Per row the first of ten rectangles with sides from `smallest` to `largest`, (H, W).

    Areas are uniform shares of the image's, width over height is log-uniform in `ratio`, the corner
    is uniform over all places inside the image (Szegedy et al. 2015, sec. 6; Zhong et al. 2020,
    Algorithm 1). Rectangles that do not fit are drawn again, not clipped: an upper area above 1 is
    allowed.
    """
    height, width = image
    tries = uniforms[:, : 2 * ATTEMPTS].reshape(-1, ATTEMPTS, 2)
    areas = (area[0] + tries[..., 0] * (area[1] - area[0])) * height * width
    low, high = np.log(ratio)
    aspects = np.exp(low + tries[..., 1] * (high - low))
    heights = np.rint(np.sqrt(areas / aspects)).astype(np.int64)
    widths = np.rint(np.sqrt(areas * aspects)).astype(np.int64)
    fits = (heights <= largest[0]) & (widths <= largest[1])
    fits &= np.minimum(heights, widths) >= smallest
    chosen = fits.argmax(axis=1)  # the first that fits
    rows = np.arange(len(uniforms))
    sides = np.stack([heights[rows, chosen], widths[rows, chosen]], axis=1)
    spare = np.array(image) - sides
    corners = np.floor(uniforms[:, 2 * ATTEMPTS :] * (spare + 1)).astype(np.int64)
    return Boxes(np.concatenate([corners, sides], axis=1), fits.any(axis=1))
