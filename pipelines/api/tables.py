"""Shared by all results: a share of items with its interval, and rows as a table."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor


class Accuracy(NamedTuple):
    """A share of all items with its exact 95% interval (Clopper & Pearson 1934)."""

    value: float
    low: float
    high: float
    num_items: int

    def __str__(self) -> str:
        spread = f"[{100 * self.low:.1f}, {100 * self.high:.1f}]"
        return f"{_percent(self.value)} % 95% {spread} n={self.num_items}"


def _percent(share: float) -> float:
    return int(1000 * share) / 10  # rounded down: never above the measured figure


def accuracy_of(correct: "Tensor") -> Accuracy:
    from components.core.statistics import accuracy

    found: dict[str, Any] = accuracy(correct.cpu().numpy())
    return Accuracy(**found)


def frame(rows: Iterable[dict[str, Any]]) -> "pd.DataFrame":
    import pandas as pd

    return pd.DataFrame(list(rows))
