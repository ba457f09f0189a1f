"""Blur along a line, by zooming, and Gaussian (Hendrycks & Dietterich 2019)."""

import torch
from torch import Tensor

from components.core.settings import settings
from components.data.corruptions.filters import clipped_zoom, gaussian_filter, motion_blur
from components.data.corruptions.interface import (
    MARGIN,
    Deterministic,
    Draws,
    planes,
    planes_to_bytes,
    to_bytes,
)
from components.data.corruptions.settings import (
    GaussianBlurSettings,
    MotionBlurSettings,
    ZoomBlurSettings,
)


@settings
class MotionBlur(MotionBlurSettings):
    """ImageMagick's motion blur at an angle of -45 to 45 degrees."""

    def sample(self, generator: torch.Generator, height: int, width: int, severity: int) -> Draws:
        turn = torch.rand((), generator=generator, dtype=torch.float64)
        return {"angle": -45 + 90 * turn}

    def apply(self, images: Tensor, draws: Draws, severity: int) -> Tensor:
        radius, sigma = self.constants(severity, *images.shape[1:3])
        blurred = [
            motion_blur(image, radius=int(radius), sigma=sigma, angle=angle)
            for image, angle in zip(images.float(), draws["angle"].tolist(), strict=True)
        ]
        return to_bytes(torch.stack(blurred))


@settings
class ZoomBlur(Deterministic, ZoomBlurSettings):
    """Mean of the image and its enlargements; the factor 1 occurs twice."""

    def apply(self, images: Tensor, draws: Draws, severity: int) -> Tensor:
        count, step = self.constants(severity, *images.shape[1:3])
        levels = images.float()
        total = 2 * levels
        step = (1 + step) - 1  # as numpy.arange computes it: 26 x 1.25 is rounded up to 33 pixels
        for number in range(1, int(count)):
            total += clipped_zoom(levels, 1 + number * step)
        return to_bytes(total.div_(count + 1), margin=MARGIN)


@settings
class GaussianBlur(Deterministic, GaussianBlurSettings):
    """Gaussian filter, cut at four sigma, edge repeated."""

    def apply(self, images: Tensor, draws: Draws, severity: int) -> Tensor:
        (sigma,) = self.constants(severity, *images.shape[1:3])
        return planes_to_bytes(gaussian_filter(planes(images), sigma))
