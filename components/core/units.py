"""Units of work: what is computed, by which function, and how results may ask for more.

Whoever runs them (a cluster, a test, a notebook) is not named here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

WorkFn = Callable[[Any], pa.Table]  # payload -> result
LoadPart = Callable[[str], pa.Table]  # name of a finished unit -> its result


@dataclass(frozen=True, slots=True)
class Unit:
    """A piece of work: `name` is its file name, `about` says which items it holds."""

    name: str
    about: str
    payload: Any


class ProgressBar(Protocol):
    """Where a source shows how far the work is."""

    def at(self, completed: float, note: str = "") -> None:
        """`completed` of the total, and a note beside the bar."""


class UnitSource(Protocol):
    """Receives results and may ask for more units; what it asks for must not change the outcome."""

    counts: str  # what the progress bar counts, and up to how many
    total: int

    def keep(self, unit: Unit, table: pa.Table) -> None:
        """A unit is finished, in this start or an earlier one."""

    def next(self, room: int) -> Sequence[Unit]:
        """At most `room` further units; none: wait until another one is kept."""

    def show(self, bar: ProgressBar) -> None:
        """Update the progress bar."""
