"""Shared by all results: a share of items with its interval, and rows as a table."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from components.core.shares import ShareKind, share_line

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor


class Accuracy(NamedTuple):
    """A share of all items with its 95% interval (Wilson 1927)."""

    value: float
    low: float
    high: float
    num_items: int

    def __str__(self) -> str:
        return _line(self, "measured")


class ProvenAccuracy(Accuracy):
    """A certified accuracy: its text is rounded down."""

    __slots__ = ()

    def __str__(self) -> str:
        return _line(self, "proven")


def _line(share: Accuracy, kind: ShareKind) -> str:
    value, low, high, num_items = share
    return share_line(value, low, high, num_items=num_items, kind=kind)


def accuracy_of(correct: "Tensor") -> Accuracy:
    from components.core.statistics import accuracy

    found: dict[str, Any] = accuracy(correct.cpu().numpy())
    return Accuracy(**found)


def frame(rows: Iterable[dict[str, Any]]) -> "pd.DataFrame":
    import pandas as pd

    return pd.DataFrame(list(rows))
