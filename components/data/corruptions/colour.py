"""Brightness, contrast and saturation (Hendrycks & Dietterich 2019).

The published code converts to HSV and back. With V the largest and S the saturation of a pixel,
V (1 - S) is its smallest channel and a conversion with a new V or S has a closed form.
"""

import torch
from torch import Tensor

from components.core.settings import settings
from components.data.corruptions.interface import MARGIN, Deterministic, Draws, to_bytes
from components.data.corruptions.settings import (
    BrightnessSettings,
    ContrastSettings,
    SaturateSettings,
)


@settings
class Brightness(Deterministic, BrightnessSettings):
    """V' = min(V + c, 1): the pixel is scaled by V' / V; a black one becomes the gray V'."""

    def apply(self, images: Tensor, draws: Draws, severity: int) -> Tensor:
        (added,) = self.constants(severity, *images.shape[1:3])
        value = images.amax(dim=-1, keepdim=True).float()
        raised = (value + 255 * added).clamp_(max=255)
        black = value == 0
        levels = images.float().masked_fill_(black, 1)
        return to_bytes(levels.mul_(raised / value.masked_fill_(black, 1)), margin=MARGIN)


@settings
class Contrast(Deterministic, ContrastSettings):
    """(x - mean) c + mean, with the mean of each channel of the image."""

    def apply(self, images: Tensor, draws: Draws, severity: int) -> Tensor:
        height, width = images.shape[1:3]
        (factor,) = self.constants(severity, height, width)
        total = images.sum(dim=(1, 2), keepdim=True)  # whole numbers: exact in any order
        mean = (total.double() / (height * width)).float()
        return to_bytes(images.float().sub_(mean).mul_(factor).add_(mean), margin=MARGIN)


@settings
class Saturate(Deterministic, SaturateSettings):
    """S' = clip(a S + b): x becomes V - (V - x) S' / S.

    The hue of a gray pixel is undefined; as in the published code it counts as red, so gray pixels
    turn red if b > 0.
    """

    def apply(self, images: Tensor, draws: Draws, severity: int) -> Tensor:
        factor, added = self.constants(severity, *images.shape[1:3])
        levels = images.float()
        value = levels.amax(dim=-1, keepdim=True)
        spread = value - levels.amin(dim=-1, keepdim=True)  # V S
        gray = spread == 0
        saturation = (factor * spread / value.clamp(min=1) + added).clamp_(max=1)
        ratio = saturation * value / spread.masked_fill(gray, 1)
        result = value - (value - levels) * ratio
        faded = value * (1 - saturation)
        red = torch.cat([value, faded, faded], dim=-1)
        return to_bytes(torch.where(gray, red, result), margin=MARGIN)
