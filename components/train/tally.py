"""Sums over the items of an epoch so far, on one worker or on all."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Total = Callable[[Tensor], Tensor]  # float64 sums of this worker -> of all workers


class Tally:
    """Means of named figures, each over the items that have it; steps may lack a figure."""

    def __init__(self, sums: Mapping[str, tuple[float, int]] | None = None) -> None:
        self._sums: dict[str, tuple[float, int]] = dict(sums or {})

    def add(self, name: str, total: float, count: int) -> None:
        """Add a sum over `count` items."""
        before, items = self._sums.get(name, (0.0, 0))
        self._sums[name] = (before + total, items + count)

    def merge(self, other: "Tally") -> None:
        for name, (total, count) in other._sums.items():
            self.add(name, total, count)

    def count(self, name: str) -> int:
        return self._sums.get(name, (0.0, 0))[1]

    def means(self) -> dict[str, float]:
        return {name: total / count for name, (total, count) in self._sums.items() if count}

    def over_workers(self, total: Total) -> "Tally":
        """The tally of all workers, which must hold the same names: they made the same steps."""
        names = sorted(self._sums)
        if not names:
            return Tally()
        own = torch.tensor([self._sums[name] for name in names], dtype=torch.float64)
        pairs = zip(names, total(own.flatten()).view(-1, 2).tolist(), strict=True)
        return Tally({name: (figure, round(count)) for name, (figure, count) in pairs})

    def emptied(self) -> "Tally":
        """The same names with zero items."""
        return Tally(dict.fromkeys(self._sums, (0.0, 0)))

    def state(self) -> dict[str, list[float]]:
        return {name: [total, count] for name, (total, count) in self._sums.items()}

    @classmethod
    def restored(cls, state: Mapping[str, list[float]]) -> "Tally":
        return cls({name: (total, int(count)) for name, (total, count) in state.items()})
