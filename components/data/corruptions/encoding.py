"""Pixelation and JPEG, image by image through Pillow (Hendrycks & Dietterich 2019)."""

from collections.abc import Callable
from io import BytesIO

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from components.core.settings import settings
from components.data.corruptions.interface import Deterministic, Draws
from components.data.corruptions.settings import JpegCompressionSettings, PixelateSettings

RELEASED_QUALITY = 85  # of the files of the released ImageNet-C


def through_pillow(images: Tensor, change: Callable[[Image.Image], Image.Image]) -> Tensor:
    """Each image changed by a function of Pillow images, on the device of `images`."""
    arrays = [np.asarray(change(Image.fromarray(array))) for array in images.cpu().numpy()]
    return torch.from_numpy(np.stack(arrays)).to(images.device)


def jpeg_round_trip(image: Image.Image, *, quality: int, optimize: bool = False) -> Image.Image:
    """The image after JPEG with chroma subsampling 4:2:0."""
    buffer = BytesIO()
    image.save(buffer, "JPEG", quality=quality, optimize=optimize)
    return Image.open(buffer)


def as_released(images: Tensor) -> Tensor:
    """Images after the JPEG files in which ImageNet-C was published."""
    return through_pillow(
        images, lambda image: jpeg_round_trip(image, quality=RELEASED_QUALITY, optimize=True)
    )


@settings
class Pixelate(Deterministic, PixelateSettings):
    """Box filter down to int(c side), box filter up."""

    def apply(self, images: Tensor, draws: Draws, severity: int) -> Tensor:
        height, width = images.shape[1:3]
        (share,) = self.constants(severity, height, width)
        small = (max(1, int(width * share)), max(1, int(height * share)))

        def pixelated(image: Image.Image) -> Image.Image:
            reduced = image.resize(small, Image.Resampling.BOX)
            return reduced.resize((width, height), Image.Resampling.BOX)

        return through_pillow(images, pixelated)


@settings
class JpegCompression(Deterministic, JpegCompressionSettings):
    """libjpeg at quality c."""

    def apply(self, images: Tensor, draws: Draws, severity: int) -> Tensor:
        quality = int(self.constants(severity, *images.shape[1:3])[0])
        return through_pillow(images, lambda image: jpeg_round_trip(image, quality=quality))
