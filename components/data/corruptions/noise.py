"""Noise: Gaussian, shot (Poisson), impulse (salt and pepper), speckle.

Hendrycks & Dietterich 2019; each element and channel is disturbed independently.
"""

from functools import lru_cache

import numpy as np
import torch
from scipy import special
from torch import Tensor

from components.core.settings import settings
from components.data.corruptions.interface import Draws, to_bytes
from components.data.corruptions.settings import (
    GaussianNoiseSettings,
    ImpulseNoiseSettings,
    ShotNoiseSettings,
    SpeckleNoiseSettings,
)


class _NormalDraws:
    """Base of the noise that draws from the normal distribution."""

    __slots__ = ()

    def sample(self, generator: torch.Generator, height: int, width: int, severity: int) -> Draws:
        return {"normal": torch.randn(height, width, 3, generator=generator)}


class _UniformDraws:
    """Base of the noise that draws uniformly."""

    __slots__ = ()

    def sample(self, generator: torch.Generator, height: int, width: int, severity: int) -> Draws:
        return {"uniform": torch.rand(height, width, 3, generator=generator)}


@settings
class GaussianNoise(_NormalDraws, GaussianNoiseSettings):
    """x + c z."""

    def apply(self, images: Tensor, draws: Draws, severity: int) -> Tensor:
        (deviation,) = self.constants(severity, *images.shape[1:3])
        return to_bytes(images.float().add_(draws["normal"], alpha=255 * deviation))


@settings
class SpeckleNoise(_NormalDraws, SpeckleNoiseSettings):
    """x + x c z."""

    def apply(self, images: Tensor, draws: Draws, severity: int) -> Tensor:
        (deviation,) = self.constants(severity, *images.shape[1:3])
        levels = images.float()
        return to_bytes(torch.addcmul(levels, levels, draws["normal"], value=deviation))


@settings
class ImpulseNoise(_UniformDraws, ImpulseNoiseSettings):
    """An element becomes 1 with probability c/2 and 0 with probability c/2."""

    def apply(self, images: Tensor, draws: Draws, severity: int) -> Tensor:
        (share,) = self.constants(severity, *images.shape[1:3])
        uniform = draws["uniform"]
        return images.masked_fill(uniform < share, 0).masked_fill_(uniform < share / 2, 255)


@lru_cache(maxsize=16)
def _poisson_thresholds(photons: int) -> Tensor:
    """(256, 2^k) float64: row v has P[Poisson(photons v / 255) <= j] at column j.

    Counts above `photons` are clipped to white, so later columns are infinite.
    """
    num_columns = 1 << photons.bit_length()
    table = np.full((256, num_columns), np.inf)
    rates = photons * np.arange(256) / 255
    table[:, :photons] = special.pdtr(np.arange(photons), rates[:, None])
    return torch.from_numpy(table)


@settings
class ShotNoise(_UniformDraws, ShotNoiseSettings):
    """Poisson(c x) / c, by inversion of the distribution function: binary search in a table."""

    def apply(self, images: Tensor, draws: Draws, severity: int) -> Tensor:
        photons = int(self.constants(severity, *images.shape[1:3])[0])
        table = _poisson_thresholds(photons).to(images.device)
        uniform, num_columns = draws["uniform"].flatten().double(), table.shape[1]
        first = images.flatten().int().mul_(num_columns)  # of the pixel's row in the flat table
        place = first.clone()
        step = num_columns // 2
        while step:  # `place` moves past every threshold that is at most the draw
            below = table.flatten().index_select(0, place.add(step - 1)) <= uniform
            place.add_(below, alpha=step)
            step //= 2
        grays = (np.arange(photons + 1) / photons * 255).astype(np.uint8)
        counts = place.sub_(first)
        return torch.from_numpy(grays).to(images.device).index_select(0, counts).view(images.shape)
