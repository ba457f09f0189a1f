"""One .npz file: x_train, y_train, x_test, y_test or images, labels; perhaps classes.

Images are uint8, (N, H, W) or (N, H, W, C). Listing reads labels and array headers only.
"""

import zipfile
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from components.core.errors import CasemateError
from components.data.sources.base import (
    Entry,
    Pixels,
    check_label_range,
    checked_labels,
    file_version,
)

_SPLIT_KEYS = {"train": ("x_train", "y_train"), "test": ("x_test", "y_test")}
_PLAIN_KEYS = {None: ("images", "labels")}
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, KeyError, OSError, ValueError)


@dataclass(frozen=True, slots=True)
class NpzSource:
    """Arrays by split (or None); each worker reads the file once and keeps it."""

    path: Path
    version: str
    classes: tuple[str, ...]
    labels: dict[str | None, list[int]]

    def entries(self) -> list[Entry]:
        return [
            Entry(_item_id(split, index), label, split, f"{key}:{index}", self.version)
            for split, labels in self.labels.items()
            for key in [_image_key(split)]
            for index, label in enumerate(labels)
        ]

    def decode(self, entry: Entry) -> Pixels:
        key, index = entry.locator.split(":")
        image: Pixels = _read_images(self.path, self.version, key)[int(index)]
        return image if image.ndim == 3 else image[..., None]


def open_npz(path: Path) -> NpzSource:
    """Checks keys, shapes, types and label range before any pixel is read."""
    if not path.is_file():
        raise CasemateError("data.path", path, "is not a file")
    version = file_version(path)
    try:
        with zipfile.ZipFile(path) as archive, np.load(path, allow_pickle=False) as arrays:
            return _open(path, version, archive, arrays)
    except _DAMAGED as error:
        raise _unreadable(path, error) from error


def _open(
    path: Path, version: str, archive: zipfile.ZipFile, arrays: "np.lib.npyio.NpzFile"
) -> NpzSource:
    keys: dict[str | None, tuple[str, str]] = {**_choose_keys(path, set(arrays.files))}
    labels = {}
    for split, (image_key, label_key) in keys.items():
        num_items = _check_images(path, archive, image_key)
        where = f"{path} [{label_key}]"
        labels[split] = checked_labels(arrays[label_key], where=where, num_items=num_items)
    if "classes" in arrays.files:
        classes = _class_names(path, arrays["classes"])
    else:
        classes = tuple(
            str(i) for i in range(max(max(row, default=0) for row in labels.values()) + 1)
        )
    for split, (_, label_key) in keys.items():
        where = f"{path} [{label_key}]"
        check_label_range(labels[split], where=where, num_classes=len(classes))
    return NpzSource(path, version, classes, labels)


def _choose_keys(path: Path, present: set[str]) -> dict[Any, tuple[str, str]]:
    for layout in (_SPLIT_KEYS, _PLAIN_KEYS):
        if {key for pair in layout.values() for key in pair} <= present:
            return {**layout}
    remedy = (
        f"has the keys {', '.join(sorted(present)) or 'none'}; "
        "wanted are x_train, y_train, x_test, y_test or images, labels"
    )
    raise CasemateError("data.path", path, remedy)


def _check_images(path: Path, archive: zipfile.ZipFile, key: str) -> int:
    shape, dtype = _header(archive, key)
    plain = len(shape) == 3 or (len(shape) == 4 and shape[3] in (1, 3))
    if dtype != np.uint8 or not plain or 0 in shape[1:]:
        remedy = f"is {dtype} {shape}; wanted is uint8 (N, H, W) or (N, H, W, C) with C 1 or 3"
        raise CasemateError("data.path", f"{path} [{key}]", remedy)
    return shape[0]


def _header(archive: zipfile.ZipFile, key: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type of one array without unpacking it."""
    with archive.open(f"{key}.npy") as file:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        else:
            shape, _, dtype = np.lib.format.read_array_header_2_0(file)
    return shape, dtype


def _class_names(path: Path, names: NDArray[Any]) -> tuple[str, ...]:
    if names.ndim != 1 or names.dtype.kind not in "US":
        raise CasemateError("data.path", f"{path} [classes]", "must be a row of strings")
    texts = tuple(name.decode() if isinstance(name, bytes) else str(name) for name in names)
    if len(set(texts)) < len(texts):
        raise CasemateError("data.path", f"{path} [classes]", "names a class twice")
    return texts


def _image_key(split: str | None) -> str:
    return "images" if split is None else f"x_{split}"


def _item_id(split: str | None, index: int) -> str:
    return f"npz-{index:05d}" if split is None else f"npz-{split}-{index:05d}"


@lru_cache(maxsize=2)  # train and test of one file
def _read_images(path: Path, version: str, key: str) -> Pixels:
    if file_version(path) != version:
        raise CasemateError("data.path", path, "changed while it was read; start again")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            images: Pixels = arrays[key]
    except _DAMAGED as error:
        raise _unreadable(path, error) from error
    return images


def _unreadable(path: Path, error: Exception) -> CasemateError:
    return CasemateError("data.path", path, f"is not a readable .npz of plain arrays ({error})")
