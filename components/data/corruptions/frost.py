"""Frost: a texture of ice over the image (Hendrycks & Dietterich 2019)."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from components.core.settings import settings
from components.data.corruptions.interface import MARGIN, Draws, to_bytes
from components.data.corruptions.settings import SMALL_SIDE, FrostSettings
from components.data.corruptions.textures import NUM_TEXTURES, fitted_texture

SMALL_STEP = 5  # textures are scaled by 0.2 for 32 px


@settings
class Frost(FrostSettings):
    """a x + b times a random crop of one of five textures."""

    def sample(self, generator: torch.Generator, height: int, width: int, severity: int) -> Draws:
        return {"uniform": torch.rand(3, generator=generator, dtype=torch.float64)}

    def apply(self, images: Tensor, draws: Draws, severity: int) -> Tensor:
        height, width = images.shape[1:3]
        own, weight = self.constants(severity, height, width)
        crops = [self._crop(row, height, width) for row in draws["uniform"].tolist()]
        ice = torch.from_numpy(np.stack(crops)).to(images.device).float()
        return to_bytes(images.float().mul_(own).add_(ice, alpha=weight), margin=MARGIN)

    def _crop(self, uniform: list[float], height: int, width: int) -> NDArray[np.uint8]:
        """The part of a texture that three draws choose: index, top, left."""
        step = SMALL_STEP if min(height, width) < SMALL_SIDE else 1
        number = int(uniform[0] * NUM_TEXTURES)
        texture = fitted_texture(self.textures, number, height, width, step)
        top, left = (
            int(draw * (size - side))
            for draw, size, side in zip(uniform[1:], texture.shape, (height, width), strict=False)
        )
        return texture[top : top + height, left : left + width]
