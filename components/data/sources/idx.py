"""MNIST and Fashion-MNIST from the published IDX files, with or without gzip.

IDX: two zero bytes, the type (8 is uint8), the number of dimensions, each dimension as a
big-endian uint32, then the values.
"""

import gzip
import math
import struct
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from components.core.errors import CasemateError
from components.data.places import Place
from components.data.sources.base import Entry, Pixels, SourceDefaults
from components.data.sources.labels import check_label_range, checked_labels
from components.data.sources.names import DIGITS, FASHION_MNIST
from components.data.sources.packing import check_ratio
from components.data.sources.versions import check_unchanged, file_size, file_version

_FILES = {"train": "train", "test": "t10k"}
_DAMAGED = (OSError, EOFError, zlib.error, struct.error, ValueError)


@dataclass(frozen=True, slots=True)
class IdxSource(SourceDefaults):
    """Two pairs of files in `folder`; each worker reads the images once and caches them."""

    name: str
    folder: Place
    classes: tuple[str, ...]

    def entries(self) -> list[Entry]:
        found: list[Entry] = []
        for split, prefix in _FILES.items():
            images, labels = _find(self.folder, prefix, "images", 3), self._labels(prefix)
            num_items = _shape_of(images, dimensions=3)[0]
            if num_items != len(labels):
                remedy = f"has {num_items} images for {len(labels)} labels"
                raise CasemateError("data.path", images, remedy)
            version = file_version(images)
            found += [
                Entry(
                    f"{self.name}-{split}-{row:05d}", label, split, f"{images.name}:{row}", version
                )
                for row, label in enumerate(labels)
            ]
        return found

    def _labels(self, prefix: str) -> list[int]:
        path = _find(self.folder, prefix, "labels", 1)
        values = _read(path, dimensions=1)
        labels = checked_labels(values, where=str(path), num_items=len(values))
        check_label_range(labels, where=str(path), num_classes=len(self.classes))
        return labels

    def decode(self, entry: Entry) -> Pixels:
        file, row = entry.locator.split(":")
        return _read_images(self.folder / file, entry.version)[int(row), :, :, None]


def open_mnist(root: Place) -> IdxSource:
    """MNIST in `root`, or where torchvision puts it below `root`."""
    return IdxSource("mnist", _home(root, "MNIST"), DIGITS)


def open_fashion_mnist(root: Place) -> IdxSource:
    """Fashion-MNIST in `root`, or where torchvision puts it below `root`."""
    return IdxSource("fashion_mnist", _home(root, "FashionMNIST"), FASHION_MNIST)


def _home(root: Place, name: str) -> Place:
    raw = root / name / "raw"
    folder = raw if raw.is_dir() else root
    for prefix in _FILES.values():  # all four, before anything is read
        _find(folder, prefix, "images", 3)
        _find(folder, prefix, "labels", 1)
    return folder


def _find(folder: Place, prefix: str, kind: str, dimensions: int) -> Place:
    plain = f"{prefix}-{kind}-idx{dimensions}-ubyte"
    for name in (plain, f"{plain}.gz", f"{prefix}-{kind}.idx{dimensions}-ubyte"):
        if (folder / name).is_file():
            return folder / name
    raise CasemateError("data.path", folder, f"lacks the file {plain} (or {plain}.gz)")


def _open(path: Place) -> BinaryIO:
    if path.suffix != ".gz":
        return path.open("rb")
    return cast(BinaryIO, gzip.open(path if isinstance(path, Path) else path.open("rb")))


def _shape_of(path: Place, *, dimensions: int) -> tuple[int, ...]:
    try:
        with _open(path) as file:
            return _header(file, dimensions=dimensions)
    except _DAMAGED as error:
        raise _unreadable(path, error) from error


def _read(path: Place, *, dimensions: int) -> NDArray[np.uint8]:
    try:
        with _open(path) as file:
            shape = _header(file, dimensions=dimensions)
            unpacked = math.prod(shape)
            check_ratio(path, packed=file_size(file_version(path)), unpacked=unpacked)
            content = file.read(unpacked + 1)
    except _DAMAGED as error:
        raise _unreadable(path, error) from error
    if len(content) != unpacked:
        more = "or more " if len(content) > unpacked else ""
        found = f"holds {len(content)} bytes {more}for {'x'.join(map(str, shape))} values"
        raise CasemateError("data.path", path, f"{found}; download it again")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)


def _header(file: BinaryIO, *, dimensions: int) -> tuple[int, ...]:
    magic = file.read(4)
    if magic != bytes([0, 0, 8, dimensions]):
        raise ValueError(f"it starts with {magic.hex() or 'nothing'}")
    return struct.unpack(f">{dimensions}I", file.read(4 * dimensions))


@lru_cache(maxsize=2)  # train and test
def _read_images(path: Place, version: str) -> NDArray[np.uint8]:
    check_unchanged(path, version)
    return _read(path, dimensions=3)


def _unreadable(path: Place, error: Exception) -> CasemateError:
    return CasemateError("data.path", path, f"is not a readable IDX file of bytes ({error})")
