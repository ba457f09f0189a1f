"""Sums over the items of an epoch so far, on one worker or on all.

Sums of a step stay on its device, so that the host need not wait for it; reading them does.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Total = Callable[[Tensor], Tensor]  # float64 sums of this worker -> of all workers


class Tally:
    """Means of named figures, each over the items that have it; steps may lack a figure."""

    def __init__(self, sums: Mapping[str, tuple[float, int]] | None = None) -> None:
        self._sums: dict[str, tuple[float | Tensor, int]] = dict(sums or {})

    def add(self, name: str, total: float | Tensor, count: int) -> None:
        """Add a sum over `count` items, as a number or as a tensor of one element."""
        before, items = self._sums.get(name, (0.0, 0))
        if isinstance(total, Tensor):
            total = total.detach().double()
        self._sums[name] = (before + total, items + count)

    def merge(self, other: "Tally") -> None:
        for name, (total, count) in other._sums.items():
            self.add(name, total, count)

    def count(self, name: str) -> int:
        return self._sums.get(name, (0.0, 0))[1]

    def means(self) -> dict[str, float]:
        return {name: total / count for name, (total, count) in self._read().items() if count}

    def _read(self) -> dict[str, tuple[float, int]]:
        """The sums as numbers, fetched from the device together."""
        waiting = {n: total for n, (total, _) in self._sums.items() if isinstance(total, Tensor)}
        found: dict[str, float] = {}
        if waiting:
            found = dict(zip(waiting, torch.stack(list(waiting.values())).tolist(), strict=True))
        sums = {n: (found.get(n, total), count) for n, (total, count) in self._sums.items()}
        self._sums = dict(sums)
        return sums  # type: ignore[return-value]  # no tensor is left

    def over_workers(self, total: Total) -> "Tally":
        """The tally of all workers, which must hold the same names: they made the same steps."""
        sums = self._read()
        names = sorted(sums)
        if not names:
            return Tally()
        own = torch.tensor([sums[name] for name in names], dtype=torch.float64)
        pairs = zip(names, total(own.flatten()).view(-1, 2).tolist(), strict=True)
        return Tally({name: (figure, round(count)) for name, (figure, count) in pairs})

    def emptied(self) -> "Tally":
        """The same names with zero items."""
        return Tally(dict.fromkeys(self._sums, (0.0, 0)))

    def state(self) -> dict[str, list[float]]:
        return {name: [total, count] for name, (total, count) in self._read().items()}

    @classmethod
    def restored(cls, state: Mapping[str, list[float]]) -> "Tally":
        return cls({name: (total, int(count)) for name, (total, count) in state.items()})
