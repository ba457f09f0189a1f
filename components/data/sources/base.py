"""Interface of sources: a cheap list of entries, each of which any worker can decode."""

from dataclasses import dataclass
from typing import Protocol

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
        """Facts about the data that matter for reading results."""
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


class NamedSplits(SourceDefaults):
    """A source of named parts: folders, files or splits of a hub, each of one of our splits."""

    __slots__ = ()

    splits: tuple[tuple[str, str | None], ...]  # (part, ours)

    @property
    def test_only(self) -> bool:
        return {ours for _, ours in self.splits} == {"test"}


def encoded(source: Source, entry: Entry) -> bytes | None:
    """The encoded image of an entry, for sources that read image files; None: no such file."""
    read = getattr(source, "encoded", None)
    content: bytes | None = read(entry) if read is not None else None
    return content
