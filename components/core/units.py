"""Units of work: payloads, the function that computes them, and sources of further units.

Independent of what runs them: a cluster, a test or a notebook.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa

from components.core.confidence_sequences import ShareSoFar

WorkFn = Callable[[Any], pa.Table]  # payload -> result


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit of work: `name` is its file name, `about` describes its items."""

    name: str
    about: str
    payload: Any


@dataclass(frozen=True, slots=True)
class SoFar:
    """What the finished units tell before the last one is finished."""

    draws: int = 0  # predictions that were computed: noisy copies, ablations
    images: int = 0  # items that were processed
    shares: Mapping[str, ShareSoFar] = field(default_factory=dict)  # by the name of a metric


class ProgressBar(Protocol):
    """Progress display of a `UnitSource`."""

    def at(self, completed: float, note: str = "") -> None:
        """Show `completed` of the total, with a note beside the bar."""


class UnitSource(Protocol):
    """Receives results and may add units; the outcome must not depend on which units it adds."""

    counts: str  # what the progress bar counts; its total
    total: int

    def keep(self, unit: Unit, table: pa.Table) -> None:
        """Receive the result of a unit, computed in this start or an earlier one."""

    def next(self, room: int) -> Sequence[Unit]:
        """At most `room` further units; empty: wait for the next result."""

    def show(self, bar: ProgressBar) -> None:
        """Update the progress bar."""

    def so_far(self) -> SoFar:
        """Intermediate results; called once in a while, never needed for the outcome."""
