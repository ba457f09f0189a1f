"""Bookkeeping of draws: which are requested, which items are decided, and the progress.

With a fixed number of draws the units are listed in advance and only counted here. With the method
`sequential` an item is drawn block by block until its declared radii are decided. Decisions use
only the draws 0, 1, ... without a gap, at declared looks, so they do not depend on the speed or
number of workers or on restarts of the run. Draws made beyond the deciding look are left out of
the votes.
"""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from components.certify.header import VotesHeader
from components.certify.l2.certificate import claim_counts, claim_sequential
from components.certify.l2.claims import GaussianClaim
from components.certify.l2.sequential import SequentialClaim, finished_prefix
from components.certify.l2.settings import GaussianSettings
from components.certify.l2.voters import block_stop, draw_unit
from components.certify.vote_rows import VoteRow, rows_of
from components.core.confidence_sequences import BAND, ShareSoFar
from components.core.errors import CasemateError
from components.core.types import Array, IntArray
from components.core.units import BriefFn, ProgressBar, SoFar, Unit

SHOW_SECONDS = 0.5


@dataclass(slots=True)
class _Item:
    """One test item: requested draws and finished blocks."""

    item_id: str = ""
    label: int = -1
    select: Array | None = None
    blocks: list[tuple[int, Array]] = field(default_factory=list)  # (first draw, predictions)
    counts: dict[str, IntArray] = field(default_factory=dict)  # of a fixed number of draws
    requested: int = 0  # draws requested, finished or not
    in_flight: int = 0
    used: int | None = None  # draws of its claim, once decided
    certified: bool = False  # correct and certified at `watched_radius`


class DrawLedger:
    """Records finished blocks, decides items, and requests further blocks of undecided ones."""

    counts = "items"

    def __init__(self, settings: GaussianSettings, header: VotesHeader) -> None:
        self.settings, self.header = settings, header
        self.total: int = header.num_items
        self.items = [_Item() for _ in range(self.total)]
        self.open = set(range(self.total))  # undecided items
        self.waiting = deque(range(self.total))  # those of them with nothing in flight
        self.drawn = 0
        self.prefix = self.held = 0  # items decided without a gap, and those of them certified
        self.shown = 0.0

    @property
    def watched_radius(self) -> float:
        """The radius of the headline: the challenged one, else the smallest positive declared."""
        if challenge := self.settings.challenge:
            return challenge.eps
        return min((radius for radius in self.settings.radii if radius > 0), default=0.0)

    @property
    def brief(self) -> BriefFn:
        """Predictions of blocks, if they decide on further ones; else votes per class."""
        return predictions_of if self.settings.method == "sequential" else votes_of

    def keep(self, unit: Unit, brief: list[list[Any]]) -> None:
        """Record a finished block; decide its item if possible."""
        index = unit.payload[0].item
        item = self.items[index]
        item.in_flight = max(0, item.in_flight - 1)  # 0: a unit of a listed, fixed number
        if item.used is not None:
            return  # requested ahead and not needed
        record = self._add_block if self.settings.method == "sequential" else self._add_votes
        for item.item_id, item.label, *block in brief:
            record(item, *block)
        self._decide(index, item)
        if item.used is None and not item.in_flight:
            self.waiting.append(index)

    def _add_block(self, item: _Item, stream: str, start: int, predictions: list[int]) -> None:
        if stream == "select":
            item.select = np.array(predictions, np.uint16)
        else:
            item.blocks.append((start, np.array(predictions, np.uint16)))
            self.drawn += len(predictions)

    def _add_votes(self, item: _Item, stream: str, classes: list[int], votes: list[int]) -> None:
        counts = item.counts.setdefault(stream, np.zeros(self.header.num_classes, np.int64))
        counts[classes] += votes
        if stream == "estimate":
            self.drawn += sum(votes)

    def _decide(self, index: int, item: _Item) -> None:
        decide = self._sequential if self.settings.method == "sequential" else self._fixed
        claim = decide(item)
        if claim is None:
            return
        item.used, item.blocks, item.select, item.counts = claim.n, [], None, {}
        item.certified = claim.prediction == item.label and claim.radius >= self.watched_radius
        self.open.discard(index)

    def _sequential(self, item: _Item) -> SequentialClaim | None:
        estimate = finished_prefix(item.blocks)
        if item.select is None or not len(estimate):
            return None
        claim = claim_sequential(item.select, estimate, self.header)
        return claim if claim.finished else None

    def _fixed(self, item: _Item) -> GaussianClaim | None:
        drawn = {stream: int(counts.sum()) for stream, counts in item.counts.items()}
        if "select" not in drawn or drawn.get("estimate", 0) < self.settings.num_estimate:
            return None
        alpha = self.settings.failure_prob
        return claim_counts(item.counts, self.header, item_id=item.item_id, alpha=alpha)

    def next(self, room: int, *, ahead: int) -> Sequence[Unit]:
        """The next blocks of waiting items, then, up to `ahead`, further ones of undecided items.

        The latter are not needed if the block before them decides.
        """
        if self.settings.method != "sequential":
            return ()
        units: list[Unit] = []
        while len(units) < room and self.waiting:
            units += self._request(self.waiting.popleft())
        while len(units) < ahead and (index := self._least_ahead()) is not None:
            units += self._request(index)
        return units

    def _request(self, index: int) -> list[Unit]:
        item, start = self.items[index], self.items[index].requested
        if item.used is not None or start >= self.settings.num_estimate:
            return []
        item.requested = block_stop(self.settings, start)
        item.in_flight += 1
        return [draw_unit(self.settings, index, start)]

    def _least_ahead(self) -> int | None:
        """The undecided item with the fewest blocks in flight that has draws left."""
        left = (i for i in self.open if self.items[i].requested < self.settings.num_estimate)
        return min(left, key=lambda i: (self.items[i].in_flight, i), default=None)

    def show(self, bar: ProgressBar) -> None:
        """Items decided, and the certified share among the first of them with its band."""
        now = time.monotonic()
        if now - self.shown < SHOW_SECONDS and self.open:
            return
        self.shown = now
        parts = self.drawn / self.settings.num_estimate  # for a fixed number of draws
        decided = self.total - len(self.open)
        bar.at(decided if self.settings.method == "sequential" else parts, self.certified_so_far())

    def share_so_far(self) -> ShareSoFar | None:
        """The certified share of the items decided so far; None before the first item."""
        while self.prefix < self.total and self.items[self.prefix].used is not None:
            self.held += self.items[self.prefix].certified
            self.prefix += 1
        if not self.prefix:
            return None
        decided = [item for item in self.items if item.used is not None]
        sure = sum(item.certified for item in decided)
        open_ = self.total - len(decided)
        return ShareSoFar(self.held, self.prefix, self.total, least=sure, most=open_ + sure)

    def certified_so_far(self) -> str:
        """The certified share of the items decided so far, as text."""
        share = self.share_so_far()
        if share is None:
            return ""
        low, high = share.band()
        return (
            f"certified at {self.watched_radius:g}: {100 * share.value:.1f}% of the first "
            f"{share.seen}, {100 * (1 - BAND):g}% band {100 * low:.1f} to {100 * high:.1f}"
        )

    def so_far(self) -> SoFar:
        """Draws, decided items, and the certified share of these."""
        share = self.share_so_far()
        return SoFar(
            draws=self.drawn,
            images=self.total - len(self.open),
            shares={f"accuracy_at_{radius_suffix(self.watched_radius)}": share} if share else {},
        )

    def votes(self, tables: Iterable[pa.Table]) -> Iterator[pa.Table | VoteRow]:
        """The votes of all decided items, up to the look that decided; the others are left out."""
        if self.settings.method != "sequential":
            yield from tables
            return
        used = {item.item_id: _decided(index, item) for index, item in enumerate(self.items)}
        starts = list(self._starts())
        # One bit per block that is needed: a block that arrives twice counts once.
        missing = {item_id: (1 << bisect_left(starts, n)) - 1 for item_id, n in used.items()}
        for table in tables:
            for row in rows_of(table):
                if row.stream == "estimate":
                    if row.start >= used[row.item_id]:
                        continue  # drawn ahead and not needed
                    missing[row.item_id] &= ~(1 << starts.index(row.start))
                    row = _cut(row, used[row.item_id])
                yield row
        for item_id, blocks in missing.items():
            if blocks:
                first = starts[(blocks & -blocks).bit_length() - 1]
                remedy = f"lacks its draws from {first} on; start again to draw them"
                raise CasemateError("votes", f"item {item_id}", remedy)

    def _starts(self) -> Iterator[int]:
        """Where the blocks of an item start, in their order."""
        start = 0
        while start < self.settings.num_estimate:
            yield start
            start = block_stop(self.settings, start)


def predictions_of(table: pa.Table) -> list[list[Any]]:
    """Item, label, stream, first draw and predictions of every block."""
    return [
        [row.item_id, row.label, row.stream, row.start, row.predictions.tolist()]
        for row in rows_of(table)
    ]


def votes_of(table: pa.Table) -> list[list[Any]]:
    """Item, label, stream, predicted classes and their numbers of votes, of every block."""
    found = []
    for row in rows_of(table):
        classes, votes = np.unique(row.predictions, return_counts=True)
        found.append([row.item_id, row.label, row.stream, classes.tolist(), votes.tolist()])
    return found


def radius_suffix(radius: float) -> str:
    """Two decimals, or all digits if there are more: every radius has its own metric."""
    short = f"{radius:.2f}"
    return short if float(short) == radius else repr(float(radius))


def _decided(index: int, item: _Item) -> int:
    assert item.used is not None, f"test item {index} is not decided"
    return item.used


def _cut(row: VoteRow, used: int) -> VoteRow:
    if row.stop <= used:
        return row
    return replace(row, stop=used, predictions=row.predictions[: used - row.start])
