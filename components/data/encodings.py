"""How a split's pixels are stored: PNG, JPEG, or raw bytes. Only training splits may lose detail.

JPEG is decoded by TorchCodec, on every machine: the pixels of a file depend on the decoder, so its
name and version belong to the dataset. Free of torch until the first JPEG is decoded.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from PIL import Image

from components.core.errors import CasemateError
from components.data.settings import DataSettings
from components.data.sources.base import Pixels

if TYPE_CHECKING:  # workers that only read PNG do not load torch
    import torch
    from torch import Tensor

FORMATS = ("png", "jpeg", "raw")
DECODER = "torchcodec"
SUBSAMPLING = "4:4:4"  # colours keep their resolution
JPEG_START = b"\xff\xd8\xff"


@dataclass(frozen=True, slots=True)
class Encoding:
    """Format of the stored images; quality, subsampling and decoder for JPEG only."""

    format: str = "png"
    quality: int | None = None
    subsampling: str | None = None
    decoder: str | None = None

    @classmethod
    def of(cls, data: DataSettings) -> Self:
        """The encoding of the training splits of a recipe."""
        if data.train_format == "jpeg":
            return cls("jpeg", data.train_quality, SUBSAMPLING, jpeg_decoder())
        return cls(data.train_format)

    @classmethod
    def described(cls, document: Mapping[str, Any] | None) -> Self:
        """The encoding of a split in dataset.json; older documents know PNG only."""
        encoding = cls(**(document or {}))
        if encoding.format not in FORMATS:
            raise TypeError(f"unknown encoding {encoding.format!r}")
        return encoding

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}

    @property
    def lossless(self) -> bool:
        return self.format != "jpeg"

    def check_decoder(self, where: object) -> None:
        """Refuse JPEG that was prepared for another decoder: its pixels may differ here."""
        if self.format == "jpeg" and self.decoder != jpeg_decoder():
            named = self.decoder or "an unnamed decoder"
            remedy = f"was prepared for {named}, here is {jpeg_decoder()}; prepare again"
            raise CasemateError("dataset", where, remedy)

    def encode(self, pixels: Pixels, *, original: bytes | None = None) -> bytes:
        """The stored bytes of uint8 (H, W, C) pixels.

        `original` is an encoded image of the source. As JPEG it is kept as it is, without a second
        loss, if the decoder makes exactly these pixels of it.
        """
        if self.format == "raw":
            return pixels.tobytes()
        if self.format == "png":
            return encode_png(pixels)
        if original is not None and is_jpeg_of(original, pixels):
            return original
        buffer = io.BytesIO()
        assert self.quality is not None
        _picture(pixels).save(buffer, format="JPEG", quality=self.quality, subsampling=0)
        return buffer.getvalue()

    def decode(self, content: bytes, *, channels: int, height: int, width: int) -> Pixels:
        """uint8 (H, W, C) pixels of stored bytes; of another shape if the bytes are."""
        if self.format == "raw":
            return np.frombuffer(content, dtype=np.uint8).reshape(height, width, channels)
        if self.format == "png":
            return decode_png(content)
        return decode_jpeg(content, channels=channels)


PNG = Encoding()


def jpeg_decoder() -> str:
    """Name and version of the decoder; a part of fingerprints."""
    try:
        return f"{DECODER} {version(DECODER)}"
    except PackageNotFoundError as error:
        remedy = f"needs {DECODER}, which is not installed here; install it or write png or raw"
        raise CasemateError("data.train_format", "jpeg", remedy) from error


def encode_png(pixels: Pixels) -> bytes:
    """Lossless PNG of uint8 (H, W, C)."""
    buffer = io.BytesIO()
    _picture(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def decode_png(content: bytes) -> Pixels:
    """uint8 (H, W, C) pixels from the PNG of `encode_png`."""
    with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
        pixels = np.asarray(image, dtype=np.uint8)
    return pixels if pixels.ndim == 3 else pixels[..., None]


def decode_jpeg(content: bytes, *, channels: int) -> Pixels:
    """uint8 (H, W, C) pixels; runs without the interpreter's lock."""
    from torchcodec.decoders import decode_jpeg as decoded

    image: Tensor = decoded(content, mode="GRAY" if channels == 1 else "RGB")
    pixels: Pixels = image.permute(1, 2, 0).numpy()
    return pixels


def decode_jpegs(contents: Sequence[bytes], *, channels: int, device: "torch.device") -> "Tensor":
    """(N, C, H, W) uint8 on `device`, decoded there in one call.

    A GPU has a decoder of its own (nvJPEG), which rounds differently than that of the host.
    """
    import torch
    from torchcodec.decoders import decode_jpeg as decoded

    mode: Literal["GRAY", "RGB"] = "GRAY" if channels == 1 else "RGB"
    images: list[Tensor] = decoded(list(contents), mode=mode, device=device)
    return torch.stack(images)


def is_jpeg_of(content: bytes, pixels: Pixels) -> bool:
    """Whether the decoder makes exactly these pixels of a file.

    It rotates by EXIF and reads CMYK in its own way, unlike the sources; such files are not.
    """
    if not content.startswith(JPEG_START):
        return False
    try:
        found = decode_jpeg(content, channels=pixels.shape[2])
    except RuntimeError:  # the source reads more kinds
        return False
    return np.array_equal(found, pixels)


def _picture(pixels: Pixels) -> Image.Image:
    return Image.fromarray(np.ascontiguousarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels))
