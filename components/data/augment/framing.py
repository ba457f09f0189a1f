"""Random crops, flips and rotations."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2.functional import resized_crop

from components.core.types import Images, IntArray
from components.data.augment.boxes import UNIFORMS, random_boxes
from components.data.augment.draws import Draws


def pad_crop(images: Tensor, words: Tensor, *, pad: int) -> Tensor:
    """Each image moved by up to `pad` pixels per axis over black (He et al. 2016, sec. 4.2)."""
    side = 2 * pad + 1  # 32-bit words: the bias of the remainder is below side / 2**32
    top, left = words[:, 0] % side, words[:, 1] % side
    height, width = images.shape[-2:]
    windows = F.pad(images, [pad] * 4).unfold(2, height, 1).unfold(3, width, 1)  # a view
    rows = torch.arange(len(images), device=images.device)
    return windows[rows, :, top, left]  # windows: (B, C, 2 pad + 1, 2 pad + 1, H, W)


def random_flip(images: Tensor, words: Tensor) -> Tensor:
    """Horizontal flip with probability 1/2."""
    return torch.where(mirrored(words)[:, None, None, None], images.flip(-1), images)


def mirrored(words: Tensor) -> Tensor:
    """(B,) bool: the images that are flipped."""
    return words[:, 2] % 2 == 1


def crop_boxes(
    draws: Draws, *, image: tuple[int, int], scale: tuple[float, float], ratio: tuple[float, float]
) -> IntArray:
    """(B, 4): top, left, height, width of crops of random area and aspect.

    If none of ten attempts fits, the largest central crop of an allowed aspect.
    """
    boxes = random_boxes(
        draws.uniforms("crop", UNIFORMS),
        image=image,
        largest=image,
        smallest=1,
        area=scale,
        ratio=ratio,
    )
    height, width = image
    aspect = min(max(width / height, ratio[0]), ratio[1])
    tall, wide = min(height, round(width / aspect)), min(width, round(height * aspect))
    centre = np.array([(height - tall) // 2, (width - wide) // 2, tall, wide])
    return np.where(boxes.found[:, None], boxes.places, centre)


def resize_crops(
    images: Tensor,
    places: IntArray,
    *,
    size: int,
    interpolation: str,
    flips: Sequence[bool] | None = None,
) -> Tensor:
    """The crops scaled to `size` x `size`, antialiased, then those in `flips` mirrored.

    One library call per image: its 8-bit kernel takes a third of the time of float arithmetic. Each
    image is mirrored while it is in the CPU cache, and after scaling: the scaled mirror image has
    other roundings.
    """
    mode = InterpolationMode(interpolation)
    result = images.new_empty(len(images), images.shape[1], size, size)
    for row, place in enumerate(places.tolist()):
        crop = resized_crop(images[row], *place, [size, size], interpolation=mode, antialias=True)
        result[row] = crop.flip(-1) if flips and flips[row] else crop
    return result


def rotate(images: Images, draws: Draws, *, degrees: float) -> Images:
    """Square images rotated about their centres by up to +-`degrees`, over black.

    Nearest pixel, the default of torchvision's RandomRotation, which published settings rely on.
    """
    angles = np.deg2rad((2 * draws.uniforms("rotation", 1)[:, 0] - 1) * degrees)
    cosine, sine = np.cos(angles), np.sin(angles)
    zero = np.zeros_like(angles)
    matrices = np.stack([cosine, -sine, zero, sine, cosine, zero], axis=1).reshape(-1, 2, 3)
    grid = F.affine_grid(torch.from_numpy(matrices).to(images), list(images.shape), False)
    return F.grid_sample(images, grid, mode="nearest", padding_mode="zeros", align_corners=False)
