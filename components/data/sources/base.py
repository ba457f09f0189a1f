"""Interface of sources: a cheap list of entries, each of which any worker can decode."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from components.core.errors import CasemateError

Pixels = NDArray[np.uint8]  # (H, W, C), C is 1 or 3


@dataclass(frozen=True, slots=True)
class Entry:
    """One item of a listing; its pixels are not read yet."""

    item_id: str  # stable and readable; part of seeds and certificates
    label: int
    split_hint: str | None  # "train", "val" or "test" where the source has native splits
    locator: str  # where the source finds the pixels
    version: str = ""  # changes with the stored bytes, so that a resumed run does not mix versions


class UndecodableItemError(CasemateError):
    """One item is damaged; `data.on_error=skip` leaves it out."""


class Source(Protocol):
    """A picklable dataset: holds small arrays or a path, never an open file."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names; a label is an index into them."""
        ...

    @property
    def test_only(self) -> bool:
        """Whether all items are test items, for models trained on other data."""
        ...

    @property
    def remarks(self) -> dict[str, str]:
        """Facts about the data that readers of results should know."""
        ...

    def entries(self) -> list[Entry]:
        """All items; labels are within range and ids are unique."""
        ...

    def decode(self, entry: Entry) -> Pixels:
        """Pixels of one entry, or `UndecodableItemError` with its name."""
        ...


class SourceDefaults:
    """Defaults of optional properties."""

    __slots__ = ()

    @property
    def test_only(self) -> bool:
        return False

    @property
    def remarks(self) -> dict[str, str]:
        return {}


def checked_labels(labels: NDArray[Any], *, where: str, num_items: int) -> list[int]:
    """Labels as plain integers >= 0, one per item."""
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        found = f"{labels.dtype} of shape {labels.shape}"
        raise CasemateError("data.path", where, f"holds {found}; labels are a row of integers")
    if len(labels) != num_items:
        raise CasemateError("data.path", where, f"has {len(labels)} labels for {num_items} images")
    if num_items and labels.min() < 0:
        index = int(np.argmax(labels < 0))
        raise CasemateError(
            "data.path", where, f"has label {labels[index]} at {index}; labels start at 0"
        )
    return [int(label) for label in labels]


def check_label_range(labels: list[int], *, where: str, num_classes: int) -> None:
    """Raise an error for labels that are not an index into the classes."""
    for index, label in enumerate(labels):
        if label >= num_classes:
            remedy = f"has label {label} at {index}, but there are {num_classes} classes"
            raise CasemateError("data.path", where, remedy)


def numbered_classes(labels: list[int]) -> tuple[str, ...]:
    """0, 1, ... up to the largest label, for files without class names."""
    return tuple(str(label) for label in range(max(labels, default=0) + 1))


def match_classes(names: tuple[str, ...], *, classes: tuple[str, ...], key: str) -> list[int]:
    """Positions of `names` in `classes`: maps labels of other images to ours.

    Names are looked up. Plain numbers, used for files without class names, are positions.
    """
    known = {name: label for label, name in enumerate(classes)}
    if not set(names) <= set(known) and set(names) == {str(n) for n in range(len(names))}:
        known = {str(label): label for label in range(len(classes))}
    for name in names:
        if name not in known:
            there = ", ".join(classes[:5]) + (", ..." if len(classes) > 5 else "")
            raise CasemateError(key, f"class {name}", f"is not one of the {len(classes)}: {there}")
    return [known[name] for name in names]


def check_class_names(names: tuple[str, ...], *, key: str, where: object) -> None:
    """Raise an error if two classes have the same name."""
    if len(set(names)) < len(names):
        raise CasemateError(key, where, "names a class twice")


def unreachable(path: Path, error: OSError) -> CasemateError:
    """Error for a file that cannot be reached; never skipped, because the item is not damaged."""
    remedy = f"cannot be read here ({error.strerror}); every worker must see data.path"
    return CasemateError("data.path", path, remedy)


def file_version(path: Path) -> str:
    """Size and modification time, to detect that a file was replaced."""
    try:
        stat = path.stat()
    except OSError as error:
        raise unreachable(path, error) from error
    return f"{stat.st_size}-{stat.st_mtime_ns}"


def check_unchanged(path: Path, version: str) -> None:
    """Raise an error if a file changed since the driver listed it."""
    if file_version(path) != version:
        raise CasemateError("data.path", path, "changed while it was read; start again")
