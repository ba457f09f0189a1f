"""One image size and one number of channels for a whole dataset, in exact 8-bit arithmetic."""

from dataclasses import dataclass
from typing import get_args

import numpy as np
from PIL import Image

from components.core.errors import CasemateError
from components.core.settings import default_of
from components.data.settings import DataSettings, Fit
from components.data.sources.base import Pixels

_FITS = get_args(Fit)


@dataclass(frozen=True, slots=True)
class Fitting:
    """Image size and channels, as in the data settings of these names; None: as stored."""

    image_size: int | None = None
    fit: str = default_of(DataSettings, "fit")
    channels: int | None = None
    resize: int | None = None  # for crop: the shorter side before cropping; None: image_size

    def __post_init__(self) -> None:
        if self.fit not in _FITS:
            raise CasemateError("data.fit", self.fit, f"is unknown; choose {', '.join(_FITS)}")
        if self.channels not in (None, 1, 3):
            raise CasemateError("data.channels", self.channels, "must be 1 or 3")
        if self.image_size is not None and self.image_size < 1:
            raise CasemateError("data.image_size", self.image_size, "must be at least 1")
        if self.fit == "crop" and self.image_size is None:
            raise CasemateError("data.fit", "crop", "needs data.image_size, the side to crop to")
        if self.resize is not None:
            self._check_resize(self.resize)

    def _check_resize(self, side: int) -> None:
        if self.fit != "crop":
            raise CasemateError("data.resize", side, f"does not apply to data.fit={self.fit}")
        if self.image_size is not None and side < self.image_size:
            raise CasemateError("data.resize", side, f"is below data.image_size {self.image_size}")

    def apply(self, pixels: Pixels, *, item_id: str) -> Pixels:
        """The image with the configured channels and size."""
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] not in (1, 3):
            raise ValueError(f"{item_id}: not uint8 (H, W, 1|3): {pixels.dtype} {pixels.shape}")
        if self.channels is not None:
            pixels = to_channels(pixels, channels=self.channels)
        if self.image_size is None:
            return pixels
        if self.fit == "pad":
            return pad_centre(pixels, size=self.image_size, item_id=item_id)
        if self.fit == "resize":
            return resize_square(pixels, size=self.image_size)
        if self.fit == "squash":
            return squash(pixels, size=self.image_size)
        shorter = self.resize or self.image_size
        return resize_and_crop(pixels, size=self.image_size, shorter=shorter)

    def enlarged(self, size: int) -> "Fitting":
        """The fitting of training images stored at `size`, from which random crops are taken.

        The shorter side is not cropped: `resize` is for evaluation.
        """
        if self.fit == "pad" or self.image_size is None:
            remedy = "needs data.fit=crop or resize and data.image_size"
            raise CasemateError("data.train_size", size, remedy)
        if size < self.image_size:
            remedy = f"is below data.image_size {self.image_size}"
            raise CasemateError("data.train_size", size, remedy)
        return Fitting(size, self.fit, self.channels)


def to_channels(pixels: Pixels, *, channels: int) -> Pixels:
    """Grey to colour by repetition; colour to grey by ITU-R BT.601 luma, as Pillow rounds it."""
    if pixels.shape[2] == channels:
        return pixels
    if channels == 3:
        return np.repeat(pixels, 3, axis=2)
    grey = Image.fromarray(np.ascontiguousarray(pixels)).convert("L")
    return np.asarray(grey, dtype=np.uint8)[..., None]


def pad_centre(pixels: Pixels, *, size: int, item_id: str) -> Pixels:
    """Black border around the untouched image; an odd spare pixel goes right and below."""
    height, width, channels = pixels.shape
    if height > size or width > size:
        remedy = f"is smaller than {item_id} ({height}x{width}); pad cannot shrink: data.fit=resize"
        raise CasemateError("data.image_size", size, remedy)
    top, left = (size - height) // 2, (size - width) // 2
    framed = np.zeros((size, size, channels), dtype=np.uint8)
    framed[top : top + height, left : left + width] = pixels
    return framed


def resize_square(pixels: Pixels, *, size: int) -> Pixels:
    """The central square, scaled by Pillow's bilinear filter (antialiased, fixed-point, exact).

    Square images are not cropped; otherwise the longer side is cropped, not squeezed.
    """
    height, width, _ = pixels.shape
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = pixels[top : top + side, left : left + side]
    return _scaled(square, height=size, width=size, filter_=Image.Resampling.BILINEAR)


def squash(pixels: Pixels, *, size: int) -> Pixels:
    """The whole image as a square, its aspect ratio ignored (bilinear, antialiased)."""
    return _scaled(pixels, height=size, width=size, filter_=Image.Resampling.BILINEAR)


def resize_and_crop(pixels: Pixels, *, size: int, shorter: int) -> Pixels:
    """The central `size` x `size` after the shorter side was scaled to `shorter` (bicubic).

    Antialiased; rounding as in torchvision's Resize and CenterCrop, so that published ImageNet
    accuracies refer to the same pixels: 224 of 256, or of floor(224 / share) in general.
    """
    height, width, _ = pixels.shape
    longer = int(shorter * max(height, width) / min(height, width))
    new_height, new_width = (longer, shorter) if height > width else (shorter, longer)
    bicubic = Image.Resampling.BICUBIC
    scaled = _scaled(pixels, height=new_height, width=new_width, filter_=bicubic)
    top, left = round((new_height - size) / 2), round((new_width - size) / 2)  # half to even
    return scaled[top : top + size, left : left + size]


def _scaled(pixels: Pixels, *, height: int, width: int, filter_: Image.Resampling) -> Pixels:
    channels = pixels.shape[2]
    image = Image.fromarray(np.ascontiguousarray(pixels[..., 0] if channels == 1 else pixels))
    scaled = np.asarray(image.resize((width, height), filter_), dtype=np.uint8)
    return scaled.reshape(height, width, channels)
