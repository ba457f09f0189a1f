"""CIFAR-10-C and CIFAR-100-C, and the choice of corruptions (Hendrycks & Dietterich 2019).

One `<corruption>.npy` each, uint8 (50000, 32, 32, 3): the 10,000 test images at severity 1, then at
2, up to 5; `labels.npy` has a label per row. Files are memory-mapped, not read as a whole; of
objects, ranges of 1 MiB are read.
"""

from collections.abc import Container
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from components.core.errors import CasemateError
from components.data.places import WINDOW, Place, RemotePath
from components.data.sources.arrays import RangedRows, npy_header, whole_array
from components.data.sources.base import Entry, Pixels, SourceDefaults
from components.data.sources.labels import check_label_range, checked_labels
from components.data.sources.names import (
    BENCHMARK_CORRUPTIONS,
    CIFAR10,
    CIFAR100,
    CORRUPTIONS,
    SEVERITIES,
)
from components.data.sources.versions import check_unchanged, file_size, file_version

HEADER = 4096  # bytes that are read for the header of an array
_DAMAGED = (OSError, ValueError, EOFError)
Variant = tuple[str, int]  # (corruption, severity)


def chosen_variants(corruption: str | list[str], severity: int | str) -> list[Variant]:
    """Variants of the options: names, `benchmark` (15), `all` (19); a severity or `all`."""
    groups = {"all": CORRUPTIONS, "benchmark": BENCHMARK_CORRUPTIONS}
    asked = [corruption] if isinstance(corruption, str) else corruption
    names = groups[asked[0]] if len(asked) == 1 and asked[0] in groups else tuple(asked)
    for name in names or [""]:
        if name not in CORRUPTIONS:
            remedy = f"is unknown; choose all, benchmark or of {', '.join(CORRUPTIONS)}"
            raise CasemateError("data.options.corruption", name, remedy)
    if severity != "all" and severity not in SEVERITIES:
        raise CasemateError("data.options.severity", severity, "is neither 1 to 5 nor all")
    levels = SEVERITIES if severity == "all" else (int(severity),)
    return [(name, level) for name in dict.fromkeys(names) for level in levels]


def check_variants(root: Place, variants: list[Variant], *, present: Container[Variant]) -> None:
    """Raise an error that lists all missing variants."""
    missing = [f"{name}/{level}" for name, level in variants if (name, level) not in present]
    if missing:
        raise CasemateError("data.path", root, f"lacks {', '.join(missing)}")


@dataclass(frozen=True, slots=True)
class CorruptedCifarSource(SourceDefaults):
    """Rows of `.npy` files below `root`."""

    name: str
    root: Place
    classes: tuple[str, ...]
    variants: tuple[Variant, ...]

    @property
    def test_only(self) -> bool:
        return True

    def check(self) -> list[int]:
        """The labels; an error if an array has another number of images, or other images."""
        labels = self._labels()
        for corruption in dict.fromkeys(name for name, _ in self.variants):
            path = self.root / f"{corruption}.npy"
            _check_images(path, _images(path, file_version(path)), num_items=len(labels))
        return labels

    def entries(self) -> list[Entry]:
        labels = self.check()
        per_level = len(labels) // len(SEVERITIES)
        found: list[Entry] = []
        for corruption, level in self.variants:
            version = file_version(self.root / f"{corruption}.npy")
            start = (level - 1) * per_level
            for index, label in enumerate(labels[start : start + per_level]):
                item_id = f"{self.name}-{corruption}-{level}-{index:05d}"
                locator = f"{corruption}:{start + index}"
                found.append(Entry(item_id, label, "test", locator, version))
        return found

    def _labels(self) -> list[int]:
        path = self.root / "labels.npy"
        stored = _mapped(path, file_version(path))
        labels = checked_labels(stored, where=str(path), num_items=len(stored))
        check_label_range(labels, where=str(path), num_classes=len(self.classes))
        if len(labels) % len(SEVERITIES):
            remedy = f"has {len(labels)} labels; expected one per image, severity after severity"
            raise CasemateError("data.path", path, remedy)
        return labels

    def decode(self, entry: Entry) -> Pixels:
        corruption, row = entry.locator.split(":")
        images = _images(self.root / f"{corruption}.npy", entry.version)
        return np.array(images[int(row)], dtype=np.uint8)  # a copy: the map is not kept open


def open_cifar10_c(
    root: Place, *, corruption: str | list[str], severity: int | str
) -> CorruptedCifarSource:
    """CIFAR-10-C."""
    return _open("cifar10_c", root, CIFAR10, chosen_variants(corruption, severity))


def open_cifar100_c(
    root: Place, *, corruption: str | list[str], severity: int | str
) -> CorruptedCifarSource:
    """CIFAR-100-C."""
    return _open("cifar100_c", root, CIFAR100, chosen_variants(corruption, severity))


def _open(
    name: str, root: Place, classes: tuple[str, ...], variants: list[Variant]
) -> CorruptedCifarSource:
    check_variants(root, variants, present=cifar_c_variants(root))
    return CorruptedCifarSource(name, root, classes, tuple(variants))


def cifar_c_variants(root: Place) -> list[Variant]:
    """The variants of a folder of CIFAR-10-C or CIFAR-100-C that are there."""
    if not (root / "labels.npy").is_file():
        raise CasemateError("data.path", root, "lacks the file labels.npy")
    names = [name for name in CORRUPTIONS if (root / f"{name}.npy").is_file()]
    return [(name, level) for name in names for level in SEVERITIES]


def _check_images(path: Place, images: NDArray[Any] | RangedRows, *, num_items: int) -> None:
    if images.dtype != np.uint8 or images.shape != (num_items, 32, 32, 3):
        remedy = f"is {images.dtype} {images.shape}; expected uint8 ({num_items}, 32, 32, 3)"
        raise CasemateError("data.path", path, remedy)


@lru_cache(maxsize=len(CORRUPTIONS) + 1)  # a map costs an open file, not memory
def _mapped(path: Place, version: str) -> NDArray[Any]:
    check_unchanged(path, version)
    try:
        if isinstance(path, RemotePath):
            return whole_array(path.read_bytes())  # labels only
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except _DAMAGED as error:
        raise _unreadable(path, error) from error
    return array


def _images(path: Place, version: str) -> NDArray[Any] | RangedRows:
    return _ranged(path, version) if isinstance(path, RemotePath) else _mapped(path, version)


@lru_cache(maxsize=len(CORRUPTIONS))  # each holds one range
def _ranged(path: RemotePath, version: str) -> RangedRows:
    check_unchanged(path, version)
    try:
        with path.open(window=HEADER) as file:
            shape, fortran, dtype = npy_header(file)
            rows = RangedRows(path, version, file.tell(), shape, dtype, ahead=WINDOW)
        if fortran or dtype.hasobject:
            raise ValueError("its rows are not stored one after the other")
        if rows.offset + shape[0] * rows.row_bytes != file_size(version):
            raise ValueError("it is cut off")
    except _DAMAGED as error:
        raise _unreadable(path, error) from error
    return rows


def _unreadable(path: Place, error: Exception) -> CasemateError:
    remedy = f"is not a readable .npy of a plain array ({error}); unpack the archive again"
    return CasemateError("data.path", path, remedy)
