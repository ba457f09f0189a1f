"""Finished units of whole items: how many there are, and the certified share among the first."""

from collections.abc import Callable, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from components.certify.header import VotesHeader
from components.certify.vote_rows import SCHEMA, Votes
from components.core.confidence_sequences import ShareSoFar
from components.core.units import ProgressBar, SoFar, Unit

Verdicts = Callable[[Votes], Sequence[bool]]  # per item, whether it is correct and certified


class ItemLedger:
    """Counts finished units; certifies their items when intermediate results are asked for."""

    counts = "units"

    def __init__(
        self, units: Sequence[Unit], header: VotesHeader, verdicts: Verdicts, *, name: str
    ) -> None:
        self.header, self.verdicts, self.name = header, verdicts, name
        self.total, self.done = len(units), 0
        self.order = [unit.name for unit in units]
        self.fresh: dict[str, pa.Table] = {}  # finished, not certified yet
        self.held: dict[str, tuple[int, int]] = {}  # certified items and all items, by unit
        self.draws = self.images = 0

    def keep(self, unit: Unit, table: pa.Table) -> None:
        self.done += 1
        self.fresh[unit.name] = table

    def next(self, room: int) -> Sequence[Unit]:
        return ()

    def show(self, bar: ProgressBar) -> None:
        bar.at(self.done)

    def so_far(self) -> SoFar:
        """Votes, items, and the certified share."""
        while self.fresh:
            name, table = self.fresh.popitem()
            found = self.verdicts(Votes(self.header, table.select(SCHEMA.names).cast(SCHEMA), ""))
            self.held[name] = sum(found), len(found)
            self.images += len(found)
            self.draws += int(pc.sum(pc.list_value_length(table["predictions"])).as_py() or 0)
        held = seen = 0
        for name in self.order:  # without a gap: units with easy items may be finished first
            if name not in self.held:
                break
            held, seen = held + self.held[name][0], seen + self.held[name][1]
        if not seen:
            return SoFar(draws=self.draws, images=self.images)
        least, total = sum(count for count, _ in self.held.values()), self.header.num_items
        share = ShareSoFar(held, seen, total, least=least, most=total - self.images + least)
        return SoFar(draws=self.draws, images=self.images, shares={self.name: share})
