"""Leases: runs of units that a worker computes in one call and stores as one object.

The driver cuts them so that a lease takes about `LEASE_SECONDS`, and less towards the end of the
work, where long leases would leave workers idle (guided self-scheduling). A worker that takes
longer stops between two units; the driver gets the rest back.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import pyarrow as pa

from components.core.units import BriefFn, Unit, WorkFn

IN_FLIGHT = 2  # leases per worker: hides latency, keeps memory bounded
LEASE_SECONDS = 35.0  # of a lease, as planned by the driver
STOP_SECONDS = 45.0  # after which a worker stops: units of even length never leave a rest
LEASE_BYTES = 2**26  # of results, after which a worker stops
LEASE_UNITS = 10_000  # at most: their names travel with them
FORGETTING = 0.7  # weight of all earlier leases in the mean seconds per unit


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
    """Units for one worker, in order; the number is never used again."""

    number: int
    units: tuple[Unit, ...]


class Pulse(NamedTuple):
    """How far a worker is with a lease."""

    num_done: int  # units
    at_hand: int  # model evaluations in the unit after them
    evaluations: int  # in the whole lease


def under_way(lease: Lease, pulse: Pulse) -> float:
    """Items of a lease that are computed and not yet returned; of the unit at hand a share."""
    items = sum(unit.num_items for unit in lease.units[: pulse.num_done])
    for unit in lease.units[pulse.num_done : pulse.num_done + 1]:
        if unit.num_evaluations:
            items += unit.num_items * min(1.0, pulse.at_hand / unit.num_evaluations)
    return items


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a lease: its first units are finished; `error` is that of the next one."""

    num_done: int = 0
    seconds: float = 0.0  # of the finished units
    group: str = ""  # the key of their object
    num_bytes: int = 0  # of that object
    briefs: Sequence[Any] | None = None  # None: none are needed
    error: BaseException | None = None
    evaluations: int = 0  # of models


class Queue:
    """Units that wait for a worker, and how many of them make a lease."""

    def __init__(self, units: Iterable[Unit]) -> None:
        self.units = deque(units)
        self.alone: set[str] = set()  # units of a lease whose worker died
        self.numbers = count()
        self.seconds = self.num_measured = 0.0

    def __len__(self) -> int:
        return len(self.units)

    def extend(self, units: Iterable[Unit]) -> None:
        self.units.extend(units)

    def give_back(self, unit: Unit) -> None:
        """Put a unit in front of all others."""
        self.units.appendleft(unit)

    def separate(self, names: Collection[str]) -> None:
        """Give out these units one by one: any of them may have killed its worker."""
        self.alone.update(names)

    def measured(self, num_units: int, seconds: float) -> None:
        """Learn from a finished lease."""
        self.seconds = FORGETTING * self.seconds + seconds
        self.num_measured = FORGETTING * self.num_measured + num_units

    @property
    def most(self) -> int:
        """Units that take about `LEASE_SECONDS`; 1 before the first is finished."""
        if not self.num_measured:
            return 1
        mean = max(self.seconds / self.num_measured, LEASE_SECONDS / LEASE_UNITS)
        return max(1, int(LEASE_SECONDS / mean))

    def room(self, num_workers: int) -> int:
        """How many more units the next leases can use."""
        return IN_FLIGHT * num_workers * self.most - len(self.units)

    def take(self, num_workers: int) -> Lease:
        """The next lease: a share of what is left, so that all workers end at the same time."""
        size = min(len(self.units) // (IN_FLIGHT * num_workers), self.most)
        units = [self.units.popleft()]
        if units[0].name not in self.alone:
            while len(units) < size and self.units[0].name not in self.alone:
                units.append(self.units.popleft())
        return Lease(next(self.numbers), tuple(units))

    def take_alone(self, unit: Unit) -> Lease:
        """A lease of a unit that is not in the queue."""
        return Lease(next(self.numbers), (unit,))


def work_off(
    make: Callable[[], WorkFn],
    payloads: Sequence[Any],
    *,
    write: Callable[[Sequence[pa.Table], Sequence[Any] | None], tuple[str, int]],
    brief: BriefFn | None,
    begin: Callable[[int], None] = lambda num_done: None,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Compute the units of a lease until its time is up, and `write` what is finished.

    Before each unit `begin` is called with the number of finished ones.
    An error of `make` or of `write` belongs to the first unit: nothing is finished then.
    """
    tables: list[pa.Table] = []
    briefs: list[Any] = []
    error: Exception | None = None
    num_bytes = 0
    try:
        work = make()
        began = clock()
        for payload in payloads:
            begin(len(tables))
            try:
                table = work(payload)
                note = brief(table) if brief else None
            except Exception as failure:
                error = failure
                break
            tables.append(table)
            briefs.append(note)
            num_bytes += table.nbytes
            if clock() - began >= STOP_SECONDS or num_bytes >= LEASE_BYTES:
                break
        seconds = clock() - began
        notes = briefs if brief else None
        group, written = write(tables, notes) if tables else ("", 0)
    except Exception as failure:
        return Outcome(error=failure)
    return Outcome(len(tables), seconds, group, written, notes, error)
