"""What every source promises: a cheap list of entries, and one entry decoded on any worker."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from components.core.errors import CasemateError

Pixels = NDArray[np.uint8]  # (H, W, C), C is 1 or 3


@dataclass(frozen=True, slots=True)
class Entry:
    """One item as the listing knows it, before anybody reads its pixels."""

    item_id: str  # stable and readable; seeds and certificates name the item by it
    label: int
    split_hint: str | None  # "train", "val" or "test" where the source has native splits
    locator: str  # where the source finds the pixels
    version: str = ""  # changes with the stored bytes, so a resumed run never mixes old and new


class UndecodableItemError(CasemateError):
    """The fault of one item alone: what `data.on_error=skip` may leave out."""


class Source(Protocol):
    """Picklable: it carries small arrays or a path, never an open file."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names; a label is an index into them."""
        ...

    @property
    def test_only(self) -> bool:
        """Made to evaluate models trained elsewhere: all items are test items."""
        ...

    @property
    def remarks(self) -> dict[str, str]:
        """Facts about the listing that a reader of results should know."""
        ...

    def entries(self) -> list[Entry]:
        """All items; labels are within range and ids are unique."""
        ...

    def decode(self, entry: Entry) -> Pixels:
        """Pixels of one entry, or `UndecodableItemError` with its name."""
        ...


class SourceDefaults:
    """What holds for a source that does not say otherwise."""

    __slots__ = ()

    @property
    def test_only(self) -> bool:
        return False

    @property
    def remarks(self) -> dict[str, str]:
        return {}
