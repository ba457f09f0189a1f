"""What the executor's loop works with: workers, their places, what happens to them.

`Crew` are the workers, `Desk` is where units come from and results go. `actors` and `shards` have
the real ones.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from components.core.units import Unit
from pipelines.runtime.leases import Lease, Outcome, Pulse


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker runs: a node, and the devices that it holds there."""

    node: str  # its id
    name: str  # address and host name
    devices: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}, GPU {', '.join(self.devices)}" if self.devices else self.name


class Worker(NamedTuple):
    """A process that computes leases; its number is never used again."""

    number: int
    place: Place


class Ready(NamedTuple):
    worker: Worker


class NotStarted(NamedTuple):
    error: BaseException


class Returned(NamedTuple):
    """A worker has ended a lease: with results, with an error, or with both."""

    worker: Worker
    lease: Lease
    outcome: Outcome


class Lost(NamedTuple):
    """The worker died, alone or with its node; `announced`: the node was taken away."""

    worker: Worker
    lease: Lease
    error: BaseException
    announced: bool = False


Event = Ready | NotStarted | Returned | Lost


@dataclass(slots=True)
class State:
    """Figures of the loop."""

    ready: int = 0
    wanted: int = 0
    failures: int = 0
    waiting_seconds: float = 0.0
    under_way: float = 0.0  # items that are computed and not yet returned
    evaluations: int = 0  # of models, also of what is under way


class Crew(Protocol):
    """Workers that come and go."""

    @property
    def num_pending(self) -> int:
        """Workers that were asked for and are not ready yet."""

    def capacity(self) -> int:
        """How many workers there may be now: a request of the recipe, or what fits."""

    def nodes(self) -> Collection[str]:
        """Nodes that a worker fits on, if nothing else ran there."""

    def hire(self, *, avoid: Collection[str]) -> None:
        """Ask for one more worker, on none of these nodes."""

    def trim(self, num_pending: int) -> None:
        """Withdraw requests for workers that are not ready yet, but for so many."""

    def dismiss(self, worker: Worker, *, hold: bool = False) -> None:
        """End a worker; with `hold` it keeps its devices, so that no other worker gets them."""

    def send(self, worker: Worker, lease: Lease) -> None:
        """Give units to a worker; their end is an event."""

    def wait(self, seconds: float) -> Sequence[Event]:
        """What happened; returns at the first event, or after so many seconds."""

    def pulses(self) -> Mapping[int, Pulse]:
        """How far leases are, by their number; short ones are missing."""

    def needs(self) -> str:
        """What the pending workers wait for, in words."""


class Desk(Protocol):
    """What the loop works for: where units come from, where results and messages go."""

    def more(self, room: int, *, ahead: int) -> Sequence[Unit]:
        """Up to `room` further units; those that may be unnecessary only up to `ahead`."""

    def keep(self, units: Sequence[Unit], outcome: Outcome) -> None:
        """Record finished units, which their worker has stored."""

    def look(self, state: State) -> None:
        """Show the state; called about once a second."""

    def tell(self, text: str) -> None:
        """Tell the user."""
