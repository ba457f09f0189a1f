"""The loop of the sharded executor: which worker gets which units.

Independent of Ray: workers are those of a `Crew`, which a test can replace.

- Only workers that are ready hold leases. Further ones are asked for as the cluster grows.
- A worker that raised or died is replaced. Its unit is tried again on another node if there is one,
  else on another device, else in the new process. A unit that fails `MAX_TRIES` times fails the
  stage by name when all others are done.
- If a worker dies in a lease of several units, any of them may be the cause: none is blamed, and
  each of them becomes a lease of its own.
- A place (a node, or its GPUs that a worker holds) that is suspected (`blame`) gets no more units
  while others have work. Once it is proven to be the cause, it is left out and named.
- When every place fails and nothing succeeds, the stage ends with the first cause.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

from components.core.errors import CasemateError, last_line
from components.core.units import Unit
from pipelines.runtime.blame import Blame, ShardFailedError
from pipelines.runtime.crew import (
    Crew,
    Desk,
    Event,
    Lost,
    NotStarted,
    Place,
    Ready,
    Returned,
    State,
    Worker,
)
from pipelines.runtime.leases import IN_FLIGHT, Lease, Outcome, Queue, under_way

MAX_FAILED_STARTS = 5
PATIENCE_SECONDS = 60.0  # in which a place gets a new worker
LOOK_SECONDS = 1.0
TELL_AFTER, TELL_EVERY = 5.0, 60.0  # seconds of waiting


class Dispatch:
    """Feeds ready workers, keeps results, and repeats what failed."""

    def __init__(
        self,
        crew: Crew,
        desk: Desk,
        todo: Sequence[Unit],
        *,
        max_wait: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.crew, self.desk, self.max_wait, self.clock = crew, desk, max_wait, clock
        self.todo, self.retries = Queue(todo), deque[Unit]()
        self.workers: dict[int, Worker] = {}  # that are ready
        self.held: dict[int, list[Lease]] = {}  # also of dismissed workers, until their calls end
        self.num_held = 0  # units
        self.evaluated = 0  # model evaluations of leases that have ended
        self.blamed: dict[int, Lease] = {}  # the lease that a dead worker was busy with
        self.idle: deque[Worker] = deque()  # one entry per free slot
        self.blame = Blame()
        self.left_out: set[Place] = set()
        self.seen: dict[Place, float] = {}  # when a worker was lost there
        self.state = State()
        self.failed_starts = 0
        self.shunned: set[str] = set()
        self.last_ready = self.looked = self.told = clock()
        self.said_few = False

    def run(self) -> None:
        """Compute all units, or raise with a reason; what is finished is kept in any case."""
        try:
            self._look()
            while self.todo or self.retries or self.num_held:
                for event in self.crew.wait(LOOK_SECONDS):
                    self._handle(event)
                self._feed()
                if self.clock() - self.looked >= LOOK_SECONDS:
                    self._look()
        finally:
            self.crew.trim(0)
        self.blame.check_units()

    # Events ---------------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        match event:
            case Returned(worker, lease, outcome):
                self._returned(worker, lease, outcome)
            case Ready(worker):
                self._ready(worker)
            case Lost(worker, lease, error, announced):
                self._lost(worker, lease, error, announced=announced)
            case NotStarted(error):
                self._not_started(error)

    def _ready(self, worker: Worker) -> None:
        self.failed_starts = 0
        if worker.place in self.left_out:
            self.crew.dismiss(worker, hold=bool(worker.place.devices))
            return
        self.workers[worker.number] = worker
        self.held[worker.number] = []
        self.idle.extend([worker] * IN_FLIGHT)
        self.last_ready = self.clock()

    def _returned(self, worker: Worker, lease: Lease, outcome: Outcome) -> None:
        """Keep what is finished, blame the unit that raised, give the rest out again."""
        self._release(worker, lease)
        self.evaluated += outcome.evaluations
        units, rest = lease.units[: outcome.num_done], lease.units[outcome.num_done :]
        if units:
            self.todo.measured(len(units), outcome.seconds)
            self.desk.keep(units, outcome)
            for place, num_units in self.blame.add_success(units, worker.place):
                self._leave_out(place, num_units)
        if outcome.error is None:
            self._give_back(rest)
            if worker.number in self.workers:
                self.idle.append(worker)
            return
        if isinstance(outcome.error, CasemateError):
            raise outcome.error  # a user's mistake: a second try would fail, too
        self._dismiss(worker)
        self._give_back(rest[1:])
        self._failed(worker, rest[0], outcome.error)

    def _lost(self, worker: Worker, lease: Lease, error: BaseException, *, announced: bool) -> None:
        """The oldest lease of a dead worker is to blame, if it has one unit; the others are not."""
        if worker.number in self.workers:
            self.blamed[worker.number] = self.held[worker.number][0]
            self._dismiss(worker)
        self._release(worker, lease)
        if self.blamed.get(worker.number) is not lease or announced:
            self._give_back(lease.units)
        elif len(lease.units) == 1:
            self._failed(worker, lease.units[0], error)
        else:
            self.todo.separate([unit.name for unit in lease.units])
            self._give_back(lease.units)

    def _give_back(self, units: Sequence[Unit]) -> None:
        """Units that lose no try come first, in their order."""
        for unit in reversed(units):
            if unit.name in self.blame.tries:
                self.retries.appendleft(unit)
            else:
                self.todo.give_back(unit)

    def _not_started(self, error: BaseException) -> None:
        cause = getattr(error, "cause", None)
        if isinstance(cause, CasemateError):
            raise cause
        self.failed_starts += 1
        if self.failed_starts >= MAX_FAILED_STARTS and not self.workers:
            raise ShardFailedError(f"workers cannot start: {last_line(error)}") from error

    def _release(self, worker: Worker, lease: Lease) -> None:
        self.held[worker.number].remove(lease)
        self.num_held -= len(lease.units)
        if worker.number not in self.workers and not self.held[worker.number]:
            del self.held[worker.number]

    def _dismiss(self, worker: Worker, *, hold: bool = False) -> None:
        if self.workers.pop(worker.number, None) is None:
            return
        self.idle = deque(other for other in self.idle if other.number != worker.number)
        self.seen[worker.place] = self.clock()
        self.crew.dismiss(worker, hold=hold)
        if not self.held[worker.number]:
            del self.held[worker.number]

    def _failed(self, worker: Worker, unit: Unit, error: BaseException) -> None:
        self.state.failures += 1
        if self.blame.add_failure(unit, worker.place, error, now=self.clock()):
            self.retries.append(unit)
        places = [worker.place for worker in self.workers.values()]
        self.blame.check_hope(places, num_wanted=self.state.wanted)
        self._staff()  # before it is tried again: a request for another place is a reason to wait

    def _leave_out(self, place: Place, num_units: int) -> None:
        """Leave out a place that is to blame, if there are others."""
        if all(worker.place == place for worker in self.workers.values()):
            return
        self.left_out.add(place)
        self.desk.tell(
            f"{place} is left out: {num_units} units in a row failed there and succeeded "
            f"elsewhere; node {place.node}"
        )
        for worker in list(self.workers.values()):
            if worker.place == place:
                self._dismiss(worker, hold=bool(place.devices))

    # Feeding --------------------------------------------------------------------------------------

    def _feed(self) -> None:
        """Give leases to free workers; take more units from the source for them."""
        if self.idle:
            self._refill()
        for _ in range(len(self.idle)):
            if not (self.todo or self.retries):
                return
            worker = self.idle.popleft()
            lease = self._next_for(worker)
            if lease is None:
                self.idle.append(worker)
                continue
            self.held[worker.number].append(lease)
            self.num_held += len(lease.units)
            self.crew.send(worker, lease)

    def _refill(self) -> None:
        ahead = max(0, len(self.idle) - len(self.todo) - len(self.retries))
        if (room := max(self.todo.room(self._num_workers()), ahead)) > 0:
            self.todo.extend(self.desk.more(room, ahead=ahead))

    def _num_workers(self) -> int:
        """Those that are ready or expected: each gets its share of the units."""
        return max(1, len(self.workers), self.state.wanted)

    def _next_for(self, worker: Worker) -> Lease | None:
        if self._rests(worker.place):
            return None
        if self.held[worker.number] and self._are_scarce():
            return None  # a unit for each worker comes before a second one for some
        for index, unit in enumerate(self.retries):
            if self._may_retry(unit, worker):
                del self.retries[index]
                return self.todo.take_alone(unit)
        return self.todo.take(self._num_workers()) if self.todo else None

    def _are_scarce(self) -> bool:
        """Whether the workers without a unit, ready or not, can take all units that are left."""
        left, pending = len(self.todo) + len(self.retries), self.crew.num_pending
        if left > len(self.workers) + pending:
            return False
        return left <= pending + sum(1 for number in self.workers if not self.held[number])

    def _rests(self, place: Place) -> bool:
        """Whether a place is suspected while there are others."""
        return self.blame.is_suspected(place) and any(
            not self.blame.is_suspected(worker.place) for worker in self.workers.values()
        )

    def _may_retry(self, unit: Unit, worker: Worker) -> bool:
        """Another node if there is one, else another place, else another process.

        A place counts that had a worker a moment ago: a new one is on its way. So may be the first
        one of a further place.
        """
        past, now = self.blame.tries[unit.name], self.clock()
        usable = {w.place for w in self.workers.values() if not self.blame.is_suspected(w.place)}
        usable |= {
            place
            for place, seen in self.seen.items()
            if now - seen < PATIENCE_SECONDS and not self.blame.is_suspected(place)
        }
        usable -= self.left_out
        if fresh := {place.node for place in usable} - past.nodes:
            return worker.place.node in fresh
        if places := usable - set(past.places):
            return worker.place in places
        return not self.crew.num_pending or now - past.when >= PATIENCE_SECONDS

    # Workers --------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Ask for workers, show the state, and give up after waiting too long."""
        self.looked = self.clock()
        self._staff()
        state = self.state
        state.ready = len(self.workers)
        if self.workers:
            self.last_ready = self.looked
        state.waiting_seconds = self.looked - self.last_ready
        self._tell_waiting()
        self._add_pulses()
        self.desk.look(state)

    def _add_pulses(self) -> None:
        """What workers tell about leases that they have not returned."""
        pulses, held = self.crew.pulses(), [lease for own in self.held.values() for lease in own]
        told = [(lease, pulses[lease.number]) for lease in held if lease.number in pulses]
        self.state.under_way = sum(under_way(lease, pulse) for lease, pulse in told)
        now = sum(pulse.evaluations for _, pulse in told)
        self.state.evaluations = max(self.state.evaluations, self.evaluated + now)

    def _staff(self) -> None:
        capacity = self.crew.capacity()
        outstanding = len(self.todo) + len(self.retries) + self.num_held
        if outstanding < capacity:
            room = capacity - outstanding
            self.todo.extend(self.desk.more(room, ahead=room))
            outstanding = len(self.todo) + len(self.retries) + self.num_held
        # Never more than units, but one more for each failed try of those to be tried elsewhere.
        further = sum(len(self.blame.tries[unit.name].places) for unit in self.retries)
        self.state.wanted = wanted = min(capacity, outstanding + further)
        self.crew.trim(max(0, wanted - len(self.workers)))
        if self.failed_starts >= MAX_FAILED_STARTS and self.workers:
            return  # go on with those that are there
        avoid = {place.node for place in self.left_out if not place.devices}
        shunned = self._shunned(avoid)
        if self.shunned - shunned:
            self.crew.trim(0)  # requested elsewhere for a while, in vain
        self.shunned = shunned
        for _ in range(wanted - len(self.workers) - self.crew.num_pending):
            self.crew.hire(avoid=avoid | shunned)

    def _shunned(self, avoid: set[str]) -> set[str]:
        """Nodes on which a unit failed that is to be tried on another one, for a while."""
        for unit in self.retries:
            past = self.blame.tries[unit.name]
            tried = past.nodes
            waits = self.clock() - past.when < PATIENCE_SECONDS
            elsewhere = any(worker.place.node not in tried for worker in self.workers.values())
            if waits and not elsewhere and set(self.crew.nodes()) - avoid - tried:
                return tried
        return set()

    def _tell_waiting(self) -> None:
        state = self.state
        if state.waiting_seconds > self.max_wait:
            raise ShardFailedError(
                f"no worker was ready within cluster.max_wait ({self.max_wait:g} s): "
                f"{self.crew.needs()}; start again to continue, finished units are kept"
            )
        if state.ready and state.ready < state.wanted and not self.said_few:
            if self.looked - self.told >= TELL_AFTER:
                self.said_few = True
                more = state.wanted - state.ready
                self.desk.tell(f"{state.ready} worker(s) ready, {more} more: {self.crew.needs()}")
        elif not state.ready and state.waiting_seconds >= TELL_AFTER:
            first = self.told <= self.last_ready
            if first or self.looked - self.told >= TELL_EVERY:
                self.told = self.looked
                self.desk.tell(
                    f"waiting for {state.wanted} worker(s) since {state.waiting_seconds:.0f} s, "
                    f"none ready: {self.crew.needs()}"
                )
