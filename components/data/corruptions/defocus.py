"""Defocus: correlation with a disk (Hendrycks & Dietterich 2019)."""

import math
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from components.core.settings import settings
from components.data.corruptions.filters import mirrored
from components.data.corruptions.interface import (
    Deterministic,
    Draws,
    planes,
    planes_to_bytes,
)
from components.data.corruptions.settings import DefocusBlurSettings


def disk_kernel(radius: float, sigma: float) -> NDArray[np.float64]:
    """Disk of sum 1 on a grid of half-width max(8, radius), smoothed by a small Gaussian.

    The Gaussian has 3 x 3 taps up to radius 8 and 5 x 5 above. Its border is mirrored without the
    edge, so a disk that touches the border gains a little weight.
    """
    half = max(8, math.ceil(radius))
    grid = np.arange(-half, half + 1)
    disk = (grid[:, None] ** 2 + grid**2 <= radius**2).astype(float)
    reach = 1 if radius <= 8 else 2
    taps = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * sigma**2))
    padded = np.pad(disk / disk.sum(), reach, mode="reflect")
    for axis in (0, 1):
        windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1, axis=axis)
        padded = windows @ (taps / taps.sum())
    return padded


@lru_cache(maxsize=32)
def _spectrum(radius: float, sigma: float, height: int, width: int) -> Tensor:
    """Transform of the kernel, with its centre at the origin; conjugate, for correlation."""
    kernel = disk_kernel(radius, sigma)
    half = len(kernel) // 2
    spread = np.zeros((height, width))
    spread[: len(kernel), : len(kernel)] = kernel
    centred = np.roll(spread, (-half, -half), axis=(0, 1))
    return torch.from_numpy(np.conj(np.fft.rfft2(centred)).astype(np.complex64))


@settings
class DefocusBlur(Deterministic, DefocusBlurSettings):
    """Disk filter with a mirrored border, by FFT."""

    def apply(self, images: Tensor, draws: Draws, severity: int) -> Tensor:
        height, width = images.shape[1:3]
        radius, sigma = self.constants(severity, height, width)
        half = max(8, math.ceil(radius))
        rows = mirrored(-half, height + half, size=height, device=images.device)
        columns = mirrored(-half, width + half, size=width, device=images.device)
        padded = planes(images.index_select(1, rows).index_select(2, columns))
        shape = [1 << (size - 1).bit_length() for size in padded.shape[-2:]]
        spectrum = _spectrum(radius, sigma, *shape).to(images.device)
        blurred = [  # image by image: one shape, one rounding
            torch.fft.irfft2(torch.fft.rfft2(image, s=shape) * spectrum, s=shape)
            for image in padded
        ]
        inside = torch.stack(blurred)[..., half : half + height, half : half + width]
        return planes_to_bytes(inside)
