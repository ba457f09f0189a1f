"""One image size and one number of channels for a whole dataset, in exact 8-bit arithmetic."""

from dataclasses import dataclass

import numpy as np
from PIL import Image

from components.core.errors import CasemateError
from components.data.sources.base import Pixels


@dataclass(frozen=True, slots=True)
class Fitting:
    """What `data.image_size`, `data.fit`, `data.channels` ask for; None keeps what is there."""

    image_size: int | None = None
    fit: str = "pad"
    channels: int | None = None

    def __post_init__(self) -> None:
        if self.fit not in ("pad", "resize"):
            raise CasemateError("data.fit", self.fit, "is unknown; choose pad or resize")
        if self.channels not in (None, 1, 3):
            raise CasemateError("data.channels", self.channels, "must be 1 or 3")
        if self.image_size is not None and self.image_size < 1:
            raise CasemateError("data.image_size", self.image_size, "must be at least 1")

    def apply(self, pixels: Pixels, *, item_id: str) -> Pixels:
        """The image with the wanted channels, then with the wanted size."""
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] not in (1, 3):
            raise ValueError(f"{item_id}: not uint8 (H, W, 1|3): {pixels.dtype} {pixels.shape}")
        if self.channels is not None:
            pixels = to_channels(pixels, channels=self.channels)
        if self.image_size is None:
            return pixels
        if self.fit == "pad":
            return pad_centre(pixels, size=self.image_size, item_id=item_id)
        return resize_square(pixels, size=self.image_size)


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

    Square images lose nothing; of others the longer side is cropped, never squeezed.
    """
    height, width, channels = pixels.shape
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = np.ascontiguousarray(pixels[top : top + side, left : left + side])
    image = Image.fromarray(square[..., 0] if channels == 1 else square)
    scaled = np.asarray(image.resize((size, size), Image.Resampling.BILINEAR), dtype=np.uint8)
    return scaled.reshape(size, size, channels)
