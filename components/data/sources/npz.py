"""One .npz file: x_train, y_train, x_test, y_test; or images, labels; or image, label.

The first form may also have x_val and y_val. The last form is that of the published archives of
generated images (Gowal et al. 2021, Rebuffi et al. 2021). Images are uint8, (N, H, W) or (N, H, W,
C); `classes` may name the classes. Listing reads labels and array headers only; large uncompressed
arrays are memory-mapped. Of an object, a worker holds at most three arrays of less than `MAP_FROM`
bytes; the rows of larger ones are read one by one, or from a temporary file if they are packed.
"""

import math
import struct
import zipfile
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from components.core.errors import CasemateError
from components.data.places import Place, RemotePath
from components.data.sources.arrays import NpyHeader, RangedRows, npy_header, unpacked_array
from components.data.sources.base import Entry, Pixels, SourceDefaults
from components.data.sources.labels import (
    check_class_names,
    check_label_range,
    checked_labels,
    numbered_classes,
)
from components.data.sources.packing import check_ratio
from components.data.sources.versions import check_unchanged, file_version

_VAL = ("x_val", "y_val")
_LAYOUTS: tuple[dict[str | None, tuple[str, str]], ...] = (
    {"train": ("x_train", "y_train"), "val": _VAL, "test": ("x_test", "y_test")},
    {"train": ("x_train", "y_train"), "test": ("x_test", "y_test")},
    {None: ("images", "labels")},
    {None: ("image", "label")},
)
_DAMAGED = (
    *(zipfile.BadZipFile, zlib.error, EOFError, KeyError, OSError, ValueError),
    *(MemoryError, NotImplementedError, OverflowError, RuntimeError),  # absurd shapes, passwords
)
READ_AHEAD = 2**22  # bytes of a request where a whole array is read
HEADER = 2**12  # bytes of a request where its header is read
MAP_FROM = 2**28  # bytes; smaller arrays are read whole, which also checks the archive's CRC


Images = Pixels | RangedRows


@dataclass(frozen=True, slots=True)
class Part:
    """The items of one split, or of a file without splits."""

    split: str | None
    image_key: str
    image_shape: tuple[int, ...]
    labels: list[int]


@dataclass(frozen=True, slots=True)
class NpzSource(SourceDefaults):
    """Arrays of one file; each worker opens it once."""

    name: str
    path: Place
    version: str
    classes: tuple[str, ...]
    parts: tuple[Part, ...]

    def entries(self) -> list[Entry]:
        return [
            Entry(f"{prefix}-{index:05d}", label, part.split, locator, self.version)
            for part in self.parts
            for prefix in [self.name if part.split is None else f"{self.name}-{part.split}"]
            for index, label in enumerate(part.labels)
            for locator in [f"{part.image_key}:{index}"]
        ]

    def decode(self, entry: Entry) -> Pixels:
        key, index = entry.locator.split(":")
        image = np.array(_read_images(self.path, self.version, key)[int(index)])
        return image if image.ndim == 3 else image[..., None]


def open_npz(
    path: Place, *, name: str = "npz", default_classes: tuple[str, ...] | None = None
) -> NpzSource:
    """Open a file; checks keys, shapes, types and label range without reading pixels."""
    if not path.is_file():
        raise CasemateError("data.path", path, "is not a file")
    version = file_version(path)
    try:
        with (
            zipfile.ZipFile(_readable(path)) as archive,
            np.load(_readable(path), allow_pickle=False) as arrays,
        ):
            keys = _choose_keys(path, set(arrays.files))
            read = {key for pair in keys.values() for key in pair} | {"classes"}
            for key in sorted(read.intersection(arrays.files)):
                _check_size(path, archive, key)
            parts = tuple(_part(path, archive, arrays, *item) for item in keys.items())
            if "classes" in arrays.files:
                classes = _class_names(path, arrays["classes"])
            else:
                every = [label for part in parts for label in part.labels]
                classes = default_classes or numbered_classes(every)
    except _DAMAGED as error:
        raise _unreadable(path, error) from error
    for part, (_, label_key) in zip(parts, keys.values(), strict=True):
        where = f"{path} [{label_key}]"
        check_label_range(part.labels, where=where, num_classes=len(classes))
    return NpzSource(name, path, version, classes, parts)


def _part(
    path: Place,
    archive: zipfile.ZipFile,
    arrays: "np.lib.npyio.NpzFile",
    split: str | None,
    keys: tuple[str, str],
) -> Part:
    image_key, label_key = keys
    num_items, *image_shape = _checked_shape(path, archive, image_key)
    where = f"{path} [{label_key}]"
    labels = checked_labels(arrays[label_key], where=where, num_items=num_items)
    return Part(split, image_key, tuple(image_shape), labels)


def _check_size(path: Place, archive: zipfile.ZipFile, key: str) -> None:
    """Refuse an array that is not in the file: shorter than its shape, or packed to nothing."""
    member = archive.getinfo(f"{key}.npy")
    where = f"{path} [{key}]"
    check_ratio(where, packed=member.compress_size, unpacked=member.file_size)
    with archive.open(member) as file:
        shape, _, dtype = npy_header(file)
        size = file.tell() + math.prod(shape) * dtype.itemsize
    if size > member.file_size and not dtype.hasobject:
        remedy = f"is {dtype} {shape}: {size:,} bytes, of which it has {member.file_size:,}"
        raise CasemateError("data.path", where, remedy)


def _choose_keys(path: Place, present: set[str]) -> dict[str | None, tuple[str, str]]:
    if len(present.intersection(_VAL)) == 1:
        (alone,) = present.intersection(_VAL)
        raise CasemateError(
            "data.path", path, f"has only {alone}; {' and '.join(_VAL)} go together"
        )
    for layout in _LAYOUTS:
        if {key for pair in layout.values() for key in pair} <= present:
            return layout
    remedy = (
        f"has the keys {', '.join(sorted(present)) or 'none'}; expected "
        "x_train, y_train, x_test, y_test (and x_val, y_val) or images, labels or image, label"
    )
    raise CasemateError("data.path", path, remedy)


def _checked_shape(path: Place, archive: zipfile.ZipFile, key: str) -> tuple[int, ...]:
    with archive.open(f"{key}.npy") as file:
        shape, _, dtype = npy_header(file)
    plain = len(shape) == 3 or (len(shape) == 4 and shape[3] in (1, 3))
    if dtype != np.uint8 or not plain or 0 in shape[1:]:
        remedy = f"is {dtype} {shape}; expected uint8 (N, H, W) or (N, H, W, C) with C 1 or 3"
        raise CasemateError("data.path", f"{path} [{key}]", remedy)
    return shape


def _class_names(path: Place, names: NDArray[Any]) -> tuple[str, ...]:
    where = f"{path} [classes]"
    if names.ndim != 1 or names.dtype.kind not in "US":
        raise CasemateError("data.path", where, "must be a row of strings")
    texts = tuple(name.decode() if isinstance(name, bytes) else str(name) for name in names)
    check_class_names(texts, key="data.path", where=where)
    return texts


@lru_cache(maxsize=3)  # train, val and test of one file
def _read_images(path: Place, version: str, key: str) -> Images:
    check_unchanged(path, version)
    try:
        with zipfile.ZipFile(_readable(path)) as archive:
            member = archive.getinfo(f"{key}.npy")
        if member.file_size >= MAP_FROM and isinstance(path, RemotePath):
            return _remote_images(path, version, member)
        if member.file_size >= MAP_FROM and member.compress_type == zipfile.ZIP_STORED:
            assert isinstance(path, Path)
            return _mapped(path, member)
        with np.load(_readable(path), allow_pickle=False) as arrays:
            images: Pixels = arrays[key]
    except _DAMAGED as error:
        raise _unreadable(path, error) from error
    return images


def _mapped(path: Path, member: zipfile.ZipInfo) -> Pixels:
    """The array memory-mapped inside the archive: numpy maps .npy files but not zip members."""
    with path.open("rb") as file:
        shape, fortran, dtype = _seek_rows(file, member)
        order: Any = "F" if fortran else "C"
        return np.memmap(path, dtype, mode="r", offset=file.tell(), shape=shape, order=order)


def _seek_rows(file: IO[bytes], member: zipfile.ZipInfo) -> NpyHeader:
    """The header of an array that is not packed; the file is then at its first row.

    A zip member starts with 30 bytes that end in the lengths of its name and its extra field.
    """
    file.seek(member.header_offset)
    name_length, extra_length = struct.unpack("<26x2H", file.read(30))
    file.seek(name_length + extra_length, 1)
    return npy_header(file)


def _remote_images(path: RemotePath, version: str, member: zipfile.ZipInfo) -> Images:
    """A large array of an object, of which one row is held."""
    if member.compress_type == zipfile.ZIP_STORED:
        with path.open(window=HEADER) as file:
            shape, fortran, dtype = _seek_rows(file, member)
            if not fortran:
                return RangedRows(path, version, file.tell(), shape, dtype)
    with zipfile.ZipFile(path.open()) as archive, archive.open(member) as content:
        return unpacked_array(content, member.file_size, where=path)


def _readable(path: Place) -> Any:
    """What zipfile and numpy open: a path, or a file that reads ranges."""
    return path.open(window=READ_AHEAD) if isinstance(path, RemotePath) else path


def _unreadable(path: Place, error: Exception) -> CasemateError:
    return CasemateError("data.path", path, f"is not a readable .npz of plain arrays ({error})")
