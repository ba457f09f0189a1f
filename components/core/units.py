"""Units of work: payloads, the function that computes them, and sources of further units.

Independent of what runs them: a cluster, a test or a notebook.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa

from components.core.confidence_sequences import ShareSoFar

WorkFn = Callable[[Any], pa.Table]  # payload -> result
BriefFn = Callable[[pa.Table], Any]  # result -> what its source needs of it, a JSON value


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit of work: `name` is its file name, `about` describes its items."""

    name: str
    about: str
    payload: Any
    num_items: float = 1  # that it computes; progress counts them
    num_evaluations: int = 0  # of models, at most; 0: not known before


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
    """Receives briefs of results and may add units; which ones must not change the outcome."""

    counts: str  # what the progress bar counts

    @property
    def total(self) -> float:
        """How much of it there is."""

    @property
    def brief(self) -> BriefFn | None:
        """What `keep` needs of a result; workers compute it. None: nothing."""

    def keep(self, unit: Unit, brief: Any) -> None:
        """Receive the brief of a unit, computed in this start or an earlier one."""

    def next(self, room: int, *, ahead: int) -> Sequence[Unit]:
        """At most `room` further units; empty: wait for the next result.

        Units that may turn out to be unnecessary only if there are fewer than `ahead` others.
        """

    def show(self, bar: ProgressBar) -> None:
        """Update the progress bar."""

    def so_far(self) -> SoFar:
        """Intermediate results; called once in a while, never needed for the outcome."""
