"""Finished units of whole items: how many there are, and the certified share among the first."""

import logging
from collections.abc import Callable, Sequence
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from components.certify.header import VotesHeader
from components.certify.vote_rows import SCHEMA, Votes
from components.core.confidence_sequences import ShareSoFar
from components.core.units import BriefFn, ProgressBar, SoFar, Unit

LOG = logging.getLogger("casemate.certify")

Verdicts = Callable[[Votes], Sequence[bool]]  # per item, whether it is correct and certified
Counts = tuple[int | None, int, int]  # certified items (None: unknown), items, votes


def counts_of(table: pa.Table, *, header: VotesHeader, verdicts: Verdicts) -> Counts:
    """The brief of a unit; an error in intermediate results must not fail the unit."""
    num_votes = int(pc.sum(pc.list_value_length(table["predictions"])).as_py() or 0)
    try:
        found = verdicts(Votes(header, table.select(SCHEMA.names).cast(SCHEMA), ""))
    except Exception:
        LOG.warning("no intermediate results", exc_info=True)
        return None, table.num_rows, num_votes
    return sum(found), len(found), num_votes


class ItemLedger:
    """Counts finished units and the certified items among theirs."""

    counts = "items"

    def __init__(
        self, units: Sequence[Unit], header: VotesHeader, verdicts: Verdicts, *, name: str
    ) -> None:
        self.brief: BriefFn = partial(counts_of, header=header, verdicts=verdicts)
        self.num_items, self.name = header.num_items, name
        self.total = sum(unit.num_items for unit in units)
        self.order = [unit.name for unit in units]
        self.held: dict[str, tuple[int, int]] = {}  # certified items and all items, by unit
        self.draws = self.images = 0
        self.known = True

    def keep(self, unit: Unit, brief: Counts) -> None:
        certified, num_items, num_votes = brief
        self.images += num_items
        self.draws += num_votes
        self.known = self.known and certified is not None
        self.held[unit.name] = certified or 0, num_items

    def next(self, room: int, *, ahead: int) -> Sequence[Unit]:
        return ()

    def show(self, bar: ProgressBar) -> None:
        bar.at(self.images)

    def so_far(self) -> SoFar:
        """Votes, items, and the certified share."""
        held = seen = 0
        for name in self.order:  # without a gap: units with easy items may be finished first
            if name not in self.held:
                break
            held, seen = held + self.held[name][0], seen + self.held[name][1]
        if not seen or not self.known:
            return SoFar(draws=self.draws, images=self.images)
        least, total = sum(count for count, _ in self.held.values()), self.num_items
        share = ShareSoFar(held, seen, total, least=least, most=total - self.images + least)
        return SoFar(draws=self.draws, images=self.images, shares={self.name: share})
