"""Image files on disk: finding them and turning their bytes into pixels.

Pixels are taken as stored: an EXIF rotation is not applied, transparency is dropped.
"""

import io
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from components.core.errors import CasemateError
from components.data.places import Place, RemotePath, missing
from components.data.sources.base import Entry, Pixels, UndecodableItemError
from components.data.sources.versions import file_bytes, unreachable

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
# The formats of these suffixes, whatever the name: others of Pillow start programs (EPS).
FORMATS = ("BMP", "DIB", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_GREY_MODES = {"1", "L", "LA"}
_COLOUR_MODES = {"P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"}


def decode_image_file(path: Place) -> Pixels:
    """Pixels of one file; damaged and unreachable files raise different errors."""
    return decode_image_bytes(file_bytes(path), where=str(path))


def decode_image_bytes(content: bytes, *, where: str) -> Pixels:
    """Pixels of one encoded image, grey as (H, W, 1) and colour as (H, W, 3)."""
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            return _to_pixels(image)
    except MemoryError:
        raise
    except Exception as error:  # plug-ins raise many types for damaged files
        reason = str(error).split(" <")[0]  # Pillow prints the address of a buffer
        remedy = f"is not a readable image ({reason}); repair it or set data.on_error=skip"
        raise UndecodableItemError("data.path", where, remedy) from error


def sub_folders(folder: Place) -> list[str]:
    """Names of the visible folders directly below, sorted."""
    if not folder.is_dir():
        raise no_folder(folder)
    below: Iterator[Place] = iter(folder.iterdir())
    names = [path.name for path in below if path.is_dir() and path.name[0] != "."]
    for name in names:
        check_utf8(name, folder)
    return sorted(names)


def flat_images(folder: Place) -> list[tuple[str, str]]:
    """(name, version) of the images directly below, sorted; one system call per file.

    The version is that of `file_version`: ImageNet has over a million files, so the listing
    takes size and time from the directory scan, or size and tag from that of the store.
    """
    if isinstance(folder, RemotePath):
        objects = ((path.name, path.facts) for path in folder.iterdir())
        return sorted((name, f.version) for name, f in objects if f and looks_like_image(name))
    try:
        return sorted(_scanned(folder))
    except OSError as error:
        raise unreachable(Path(error.filename or folder), error) from error


def _scanned(folder: Path) -> Iterator[tuple[str, str]]:
    with os.scandir(folder) as files:
        for file in files:
            if looks_like_image(file.name) and not file.is_dir():
                check_utf8(file.name, folder)
                stat = file.stat()
                yield file.name, f"{stat.st_size}-{stat.st_mtime_ns}"


def class_entries(
    root: Place, below: str, *, source: str, label: int, split: str | None
) -> list[Entry]:
    """The images of one class folder, at least one, named by their path below `root`."""
    images = flat_images(root / below)
    if not images:
        raise no_images(root / below)
    return [
        Entry(f"{source}-{below}/{name}", label, split, f"{below}/{name}", version)
        for name, version in images
    ]


def no_folder(place: Place) -> CasemateError:
    """Error for a path that is not a folder, or a prefix without objects."""
    if isinstance(place, RemotePath):
        return missing(place)
    return CasemateError("data.path", place, "is not a folder")


def no_images(folder: Place) -> CasemateError:
    """Error for a folder without images."""
    kinds = " ".join(sorted(SUFFIXES))
    return CasemateError("data.path", folder, f"holds no image; looked for {kinds}")


def looks_like_image(name: str) -> bool:
    """Whether the suffix is that of an image; hidden files are excluded."""
    return not name.startswith(".") and Path(name).suffix.lower() in SUFFIXES


def check_utf8(name: str, folder: Place) -> None:
    """Reject names that are not UTF-8: names become ids in Parquet files and seeds."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        remedy = f"holds a name that is not UTF-8: {name!a}; rename it"
        raise CasemateError("data.path", ascii(str(folder)), remedy) from error


def first_folder(root: Place, names: tuple[str, ...], *, wanted: str) -> Place:
    """`root` or the first of its sub-folders that holds `wanted`: archives unpack differently."""
    for name in names:
        if (root / name / wanted).exists():
            return root / name
    raise CasemateError("data.path", root, f"lacks {wanted}; unpack the archive there")


def _to_pixels(image: Image.Image) -> Pixels:
    if image.mode in _GREY_MODES:
        return np.asarray(image.convert("L"), dtype=np.uint8)[..., None]
    if image.mode in _COLOUR_MODES:
        return np.asarray(image.convert("RGB"), dtype=np.uint8)
    raise ValueError(f"mode {image.mode} is not 8 bits per channel")
