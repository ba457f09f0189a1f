"""Filters that several corruptions share: Gaussian, motion blur, clipped zoom, borders.

Matrix products run image by image: their rounding follows the shape of the operands, so a shape
that includes the batch would let an image depend on its neighbours.
"""

import math
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from scipy import ndimage
from torch import Tensor

Border = Literal["nearest", "reflect"]  # aaa|abc|ccc and cba|abc|cba
HALF_STEP = 0.5 / 257  # of ImageMagick's 16 bits, in gray levels


@lru_cache(maxsize=128)
def gaussian_matrix(
    size: int, sigma: float, *, border: Border = "nearest", truncate: float = 4.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """(size, size) matrix of a 1-D Gaussian filter with its border rule.

    A dense matrix costs the same for any sigma; the published ones reach 171 pixels.
    """
    eye = np.eye(size)
    filtered = ndimage.gaussian_filter1d(eye, sigma, axis=0, mode=border, truncate=truncate)
    return torch.from_numpy(filtered if sigma > 0 else eye).to(dtype)


def gaussian_filter(
    maps: Tensor, sigma: float, *, border: Border = "nearest", truncate: float = 4.0
) -> Tensor:
    """Gaussian filter over the last two dimensions of (N, C, H, W) or (N, H, W)."""
    rows, columns = (
        gaussian_matrix(size, sigma, border=border, truncate=truncate, dtype=maps.dtype)
        .to(maps.device)
        for size in maps.shape[-2:]
    )  # fmt: skip
    across = [image @ columns.T for image in maps]
    return torch.stack([rows @ image for image in across])


def mirrored(start: int, stop: int, *, size: int, device: torch.device) -> Tensor:
    """Indices start..stop-1 folded into 0..size-1 without repeating the edge (dcb|abcd|cba)."""
    period = max(2 * (size - 1), 1)
    index = torch.arange(start, stop, device=device) % period
    return torch.minimum(index, period - index).clamp_(max=size - 1)


def motion_offsets(radius: int, angle: float) -> list[tuple[int, int]]:
    """(x, y) of the 2 radius + 1 one-sided taps along an angle in degrees (ImageMagick's rule)."""
    across, down = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    taps = range(2 * radius + 1)
    return [(math.ceil(i * across - 0.5), math.ceil(i * down - 0.5)) for i in taps]


def motion_blur(levels: Tensor, *, radius: int, sigma: float, angle: float) -> Tensor:
    """One image (H, W, ...) averaged along a line, Gaussian weights, replicated border.

    The released script calls ImageMagick. Its result has 16 bits, of which the PNG that the script
    reads keeps the whole gray levels (checked with ImageMagick 6.9.11); so does this one.
    """
    weights = [math.exp(-(i**2) / (2 * sigma**2)) for i in range(2 * radius + 1)]
    offsets = motion_offsets(radius, angle)
    height, width = levels.shape[:2]
    left, top = (min(0, *(offset[axis] for offset in offsets)) for axis in (0, 1))
    right, bottom = (max(0, *(offset[axis] for offset in offsets)) for axis in (0, 1))
    rows = torch.arange(top, height + bottom, device=levels.device).clamp_(0, height - 1)
    columns = torch.arange(left, width + right, device=levels.device).clamp_(0, width - 1)
    padded = levels.index_select(0, rows).index_select(1, columns)
    total = torch.zeros_like(levels)
    for weight, (x, y) in zip(weights, offsets, strict=True):
        x, y = x - left, y - top
        total.add_(padded[y : y + height, x : x + width], alpha=weight / sum(weights))
    return total.add_(HALF_STEP).floor_()


@lru_cache(maxsize=256)
def zoom_line(size: int, factor: float) -> tuple[Tensor, Tensor]:
    """Per place of a line that is cut, enlarged and trimmed: a pixel, and the share of the next."""
    kept = math.ceil(size / factor)
    enlarged = round(kept * factor)
    trim = (enlarged - size) // 2
    places = np.arange(trim, trim + size) * (kept - 1) / max(enlarged - 1, 1)
    first = np.minimum(places.astype(np.int64), max(kept - 2, 0))
    share = torch.from_numpy((places - first).astype(np.float32))
    return torch.from_numpy((size - kept) // 2 + first), share


def clipped_zoom(maps: Tensor, factor: float) -> Tensor:
    """(N, H, W, C) enlarged about its centre and cut to the same size, bilinear.

    Not torch's `interpolate`: it sums in another order if the number of threads is another.
    """
    if factor == 1:
        return maps
    for dim in (1, 2):
        first, share = (part.to(maps.device) for part in zoom_line(maps.shape[dim], factor))
        share = share.view(-1, *[1] * (3 - dim))
        following = maps.index_select(dim, first + 1)
        maps = maps.index_select(dim, first).lerp_(following, share)
    return maps
