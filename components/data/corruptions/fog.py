"""Fog: a plasma fractal is added, the brightest value kept (Hendrycks & Dietterich 2019)."""

import torch
from torch import Tensor

from components.core.settings import settings
from components.data.corruptions.interface import Draws, to_bytes
from components.data.corruptions.settings import FogSettings

ROUGHNESS = 100.0  # of the first level


def plasma(uniform: Tensor, decay: float) -> Tensor:
    """(N, S, S) height maps on [0, 1] by the toroidal diamond-square algorithm; S is a power of 2.

    `uniform` (N, S, S) lies in [-1, 1). Each point is set once, to the mean of its four neighbours
    plus its draw times w^2; w starts at 100 and falls by the factor `decay` per level. (The
    published code multiplies a draw from [-w, w) by w.)
    """
    side = uniform.shape[-1]
    heights = torch.zeros_like(uniform)
    rough, step = ROUGHNESS, side
    while step >= 2:
        half, scale = step // 2, rough**2
        corners = heights[:, ::step, ::step]
        pairs = corners + corners.roll(-1, dims=1)
        mean = (pairs + pairs.roll(-1, dims=2)) / 4
        middle = mean + scale * uniform[:, half::step, half::step]
        heights[:, half::step, half::step] = middle
        above = (middle + middle.roll(1, dims=1) + corners + corners.roll(-1, dims=2)) / 4
        heights[:, ::step, half::step] = above + scale * uniform[:, ::step, half::step]
        beside = (middle + middle.roll(1, dims=2) + corners + corners.roll(-1, dims=1)) / 4
        heights[:, half::step, ::step] = beside + scale * uniform[:, half::step, ::step]
        step, rough = half, rough / decay
    low = heights.amin(dim=(1, 2), keepdim=True)
    high = heights.amax(dim=(1, 2), keepdim=True)
    return (heights - low) / (high - low)


@settings
class Fog(FogSettings):
    """(x + c P) M / (M + c) with the plasma P and the maximum M of the image."""

    def sample(self, generator: torch.Generator, height: int, width: int, severity: int) -> Draws:
        side = 1 << (max(height, width) - 1).bit_length()
        return {"uniform": torch.rand(side, side, generator=generator) * 2 - 1}

    def apply(self, images: Tensor, draws: Draws, severity: int) -> Tensor:
        height, width = images.shape[1:3]
        density, decay = self.constants(severity, height, width)
        fog = plasma(draws["uniform"], decay)[:, :height, :width, None]
        brightest = images.amax(dim=(1, 2, 3), keepdim=True).float()
        levels = images.float() + 255 * density * fog
        return to_bytes(levels.mul_(brightest / (brightest + 255 * density)))
