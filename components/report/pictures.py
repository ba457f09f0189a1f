"""Small images as PNG data URIs at native size; the page enlarges them without smoothing."""

import base64
import io
import math

import numpy as np
from PIL import Image

from components.core.types import Array

LARGEST_SIDE = 112  # of pictures in grids, which show them smaller
LUMA = (0.299, 0.587, 0.114)
HIDDEN_TINT = (112, 128, 152)  # hidden pixels of an ablation; black would vanish on dark images


def png_uri(image: Array) -> str:
    """Data URI of a (C, H, W) image in [0, 1] with one or three channels."""
    if image.ndim != 3 or image.shape[0] not in (1, 3):
        raise ValueError(f"expected (1 or 3, H, W), got {image.shape}")
    levels = np.rint(np.clip(image, 0, 1) * 255).astype(np.uint8)
    picture = Image.fromarray(levels[0] if len(levels) == 1 else levels.transpose(1, 2, 0))
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def reduction(image: Array) -> int:
    """The smallest n for which a (C, H, W) image fits `LARGEST_SIDE` with means of n x n pixels."""
    return -(-int(max(image.shape[1:])) // LARGEST_SIDE)


def reduced(image: Array) -> Array:
    """Means of n x n pixels of a (C, H, W) image, n by `reduction`; a rest at the border is cut."""
    factor = reduction(image)
    if factor == 1:
        return image
    height, width = (side // factor * factor for side in image.shape[1:])
    tiles = image[:, :height, :width].reshape(
        len(image), height // factor, factor, width // factor, factor
    )
    return np.asarray(tiles.mean(axis=(2, 4)))


def gray(image: Array) -> Array:
    """(1, H, W) luma of a colour image; an image with one channel as it is."""
    if len(image) == 1:
        return image
    return np.asarray(np.tensordot(np.array(LUMA), image, axes=1)[None])


def amplification(clean: Array, adversarial: Array) -> int:
    """Largest whole factor that keeps every shown difference inside the grey scale.

    One factor for all given items, so that their perturbations can be compared by eye.
    """
    peak = float(np.abs(adversarial - clean).max(initial=0.0))
    # 1e-6: a budget of 8/255 must not lose a step to float32 rounding of the difference
    return 1 if peak == 0 else max(1, math.floor(0.5 / peak + 1e-6))


def perturbation(clean: Array, adversarial: Array, *, factor: int) -> Array:
    """The difference around middle grey: grey is unchanged, lighter was raised, darker lowered."""
    return np.asarray(0.5 + factor * (adversarial.astype(np.float64) - clean))


def spread_starts(starts: tuple[int, ...], *, count: int) -> tuple[int, ...]:
    """At most `count` indices into `starts`, evenly spaced over one turn of the image."""
    count = min(count, len(starts))
    return tuple(i * len(starts) // count for i in range(count))
