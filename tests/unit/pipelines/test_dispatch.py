"""The loop of the executor on simulated workers: who is blamed, what is lost, when it ends."""

import heapq
import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.core.errors import CasemateError
from components.core.units import Unit
from pipelines.runtime.blame import HOPELESS, MAX_TRIES, ShardFailedError
from pipelines.runtime.crew import Lost, NotStarted, Place, Ready, Returned, Worker
from pipelines.runtime.dispatch import Dispatch
from pipelines.runtime.leases import LEASE_SECONDS, STOP_SECONDS, Lease, Outcome, Pulse

START, WORK = 3.0, 1.0  # seconds of a start and of a unit
FAIL = 0.01  # a broken device fails at once


def make_units(number):
    return [Unit(f"u{i:05d}", f"item {i}", i) for i in range(number)]


@dataclass
class SimulatedCluster:
    """Slots that come and break; a worker per slot, its leases one after the other."""

    slots: list[Place]
    broken: set[int] = field(default_factory=set)  # slots on which every unit raises
    bad_units: set[int] = field(default_factory=set)  # raise everywhere
    deadly: set[int] = field(default_factory=set)  # kill their worker
    deaths: list[tuple[float, int]] = field(default_factory=list)  # of the worker in a slot
    joins: dict[int, float] = field(default_factory=dict)  # when a slot exists; else from the start
    asked: int | None = None
    long: dict[int, float] = field(default_factory=dict)  # seconds of units that take longer
    announced: bool = False  # deaths are those of nodes that are taken away
    cannot_start: BaseException | None = None

    def __post_init__(self):
        self.now, self.numbers, self.ties = 0.0, count(1), count()
        self.events = []  # (time, tie, what)
        self.waiting: list[set[str]] = []  # requests without a slot, with the nodes to avoid
        self.taken: dict[int, int] = {}  # slot -> worker that starts or works there
        self.starting: set[int] = set()
        self.slot_of: dict[int, int] = {}
        self.queues: dict[int, list[Lease]] = {}
        self.executions: Counter[int] = Counter()
        self.leases: list[tuple[int, Lease, float]] = []  # that ended: slot, lease, seconds
        self.placed: list[tuple[str, int]] = []
        for when, slot in self.deaths:
            self._at(when, ("death", slot))
        for when in self.joins.values():
            self._at(when, ("joined",))

    def _at(self, when, what):
        heapq.heappush(self.events, (when, next(self.ties), what))

    @property
    def num_pending(self):
        return len(self.waiting) + len(self.starting)

    def capacity(self):
        there = sum(self.joins.get(slot, 0) <= self.now for slot in range(len(self.slots)))
        return self.asked or max(1, there)

    def nodes(self):
        return {p.node for i, p in enumerate(self.slots) if self.joins.get(i, 0) <= self.now}

    def pulses(self):
        """Every worker has evaluated 100 images of the first unit of its first lease."""
        first = [leases[0] for leases in self.queues.values() if leases]
        return {lease.number: Pulse(0, at_hand=100, evaluations=100) for lease in first}

    def needs(self):
        return "each needs 1 CPU"

    def hire(self, *, avoid):
        self.waiting.append(set(avoid))
        self._place()

    def _place(self):
        for avoid in list(self.waiting):
            for slot, place in enumerate(self.slots):
                free = slot not in self.taken and self.joins.get(slot, 0) <= self.now
                if free and place.node not in avoid:
                    number = next(self.numbers)
                    self.taken[slot], self.slot_of[number] = number, slot
                    self.starting.add(number)
                    self._at(self.now + START, ("start", number))
                    self.waiting.remove(avoid)
                    break

    def trim(self, num_pending):
        while self.num_pending > num_pending:
            if self.waiting:
                self.waiting.pop()
            else:
                self._free(self.starting.pop())

    def _free(self, number):
        slot = self.slot_of.pop(number)
        del self.taken[slot]

    def dismiss(self, worker, *, hold=False):
        for lease in self.queues.pop(worker.number, []):
            self._at(self.now, ("lost", worker, lease))
        if hold:
            return
        if worker.number in self.slot_of:
            self._free(worker.number)
            self._place()

    def send(self, worker, lease):
        assert worker.number not in self.starting
        if worker.number not in self.queues:  # dead, and the loop does not know yet
            self._at(self.now, ("lost", worker, lease))
            return
        self.queues[worker.number].append(lease)
        if len(self.queues[worker.number]) == 1:
            self._begin(worker)

    def _begin(self, worker):
        """What will become of the first lease, and when."""
        lease, slot = self.queues[worker.number][0], self.slot_of[worker.number]
        seconds, done, how = 0.0, 0, "ends"
        for unit in lease.units:
            if slot in self.broken or unit.payload in self.bad_units:
                seconds, how = seconds + FAIL, "raises"
                break
            seconds += self.long.get(unit.payload, WORK)
            if unit.payload in self.deadly:
                how = "dies"
                break
            done += 1
            if seconds >= STOP_SECONDS:
                break
        self._at(self.now + seconds, ("end", worker, lease, done, seconds, how))

    def wait(self, seconds):
        until = self.now + seconds
        while self.events and self.events[0][0] <= until:
            when, _, what = heapq.heappop(self.events)
            self.now = max(self.now, when)
            if event := self._event(*what):
                return [event]
        self.now = until
        return []

    def _event(self, what, *about):
        match what:
            case "joined":
                self._place()
            case "start" if about[0] in self.starting:
                return self._started(about[0])
            case "lost":
                worker, lease = about
                died = RuntimeError("the actor died")
                return Lost(worker, lease, died, announced=self.announced)
            case "death" if (number := self.taken.get(about[0])) in self.queues:
                return self._die(Worker(number, self.slots[about[0]]))
            case "end" if about[1] in self.queues.get(about[0].number, [])[:1]:
                return self._ended(*about)

    def _started(self, number):
        self.starting.remove(number)
        if self.cannot_start:
            self._free(number)
            return NotStarted(self.cannot_start)
        self.queues[number] = []
        return Ready(Worker(number, self.slots[self.slot_of[number]]))

    def _die(self, worker):
        held = self.queues.pop(worker.number)
        self._free(worker.number)
        self._place()
        for lease in reversed(held):  # the order in which calls fail is not that of their starts
            self._at(self.now, ("lost", worker, lease))

    def _ended(self, worker, lease, done, seconds, how):
        for unit in lease.units[: done + (how != "ends")]:
            self.executions[unit.payload] += 1
            self.placed.append((unit.name, self.slot_of[worker.number]))
        self.leases.append((self.slot_of[worker.number], lease, seconds))
        if how == "dies":
            return self._die(worker)
        self.queues[worker.number].pop(0)
        if self.queues[worker.number]:
            self._begin(worker)
        return Returned(worker, lease, self.outcome(lease, done, seconds, how))

    @staticmethod
    def outcome(lease, done, seconds, how):
        error = None
        if how == "raises":
            error = ArithmeticError(f"no square of {lease.units[done].payload}")
        return Outcome(done, seconds, "key", error=error)


@dataclass
class Desk:
    kept: Counter = field(default_factory=Counter)
    told: list[str] = field(default_factory=list)
    most_ready: int = 0
    pulses: list[tuple[float, int]] = field(default_factory=list)  # items under way, evaluations

    def more(self, room, *, ahead):
        return ()

    def keep(self, units, outcome):
        assert len(units) == outcome.num_done
        self.kept.update(unit.payload for unit in units)

    def look(self, state):
        self.most_ready = max(self.most_ready, state.ready)
        assert state.ready <= max(state.wanted, state.ready)
        self.pulses.append((state.under_way, state.evaluations))

    def tell(self, text):
        self.told.append(text)


@dataclass
class Growing(Desk):
    """Items of three blocks each; a block is known when the one before it is finished."""

    num_items: int = 0
    most_ahead: int = 0

    def __post_init__(self):
        self.waiting = [(item, 0) for item in range(self.num_items)]

    def more(self, room, *, ahead):
        self.most_ahead = max(self.most_ahead, ahead)
        asked, self.waiting = self.waiting[:room], self.waiting[room:]
        return [Unit(f"{item}-{block}", f"item {item}", (item, block)) for item, block in asked]

    def keep(self, units, outcome):
        super().keep(units, outcome)
        items = [unit.payload for unit in units]
        self.waiting += [(item, block + 1) for item, block in items if block < 2]


def run(cluster, units, *, max_wait=1800.0, desk=None):
    desk = desk or Desk()
    dispatch = Dispatch(cluster, desk, units, max_wait=max_wait, clock=lambda: cluster.now)
    try:
        dispatch.run()
    except ShardFailedError as error:
        return desk, dispatch, error
    return desk, dispatch, None


def gpus(num_nodes, per_node):
    return [
        Place(f"n{node}", f"10.0.0.{node}", (str(gpu),))
        for node in range(num_nodes)
        for gpu in range(per_node)
    ]


def cpus(num_nodes, per_node):
    return [Place(f"n{i}", f"10.0.0.{i}") for i in range(num_nodes) for _ in range(per_node)]


def test_one_broken_gpu_of_64_loses_none_of_10_000_units():
    cluster = SimulatedCluster(gpus(8, 8), broken={17})
    desk, dispatch, error = run(cluster, make_units(10_000))
    assert error is None
    assert desk.kept == Counter(range(10_000))  # each once
    assert dispatch.left_out == {cluster.slots[17]}
    assert [text for text in desk.told if "10.0.0.2, GPU 1 is left out" in text]
    wasted = sum(cluster.executions.values()) - 10_000
    assert wasted <= 4, f"{wasted} executions were wasted"


def test_a_node_whose_workers_all_fail_is_left_out_and_named():
    cluster = SimulatedCluster(cpus(4, 4), broken={4, 5, 6, 7})
    desk, dispatch, error = run(cluster, make_units(400))
    assert error is None
    assert desk.kept == Counter(range(400))
    assert {place.node for place in dispatch.left_out} == {"n1"}
    assert [text for text in desk.told if "10.0.0.1 is left out" in text and "node n1" in text]
    assert (
        sum(cluster.executions.values()) - 400 <= 8
    )  # each worker of the node fails at most twice


def test_when_everything_fails_the_stage_ends_early_with_the_first_cause():
    cluster = SimulatedCluster(gpus(8, 8), broken=set(range(64)))
    desk, _, error = run(cluster, make_units(10_000))
    assert not desk.kept
    assert "no success" in str(error)
    assert "u00000 (item 0): ArithmeticError: no square of 0" in str(error)
    assert sum(cluster.executions.values()) <= 3 * 64


def test_units_that_fail_everywhere_are_named_and_blame_no_place():
    cluster = SimulatedCluster(cpus(3, 2), bad_units={5, 6, 7, 8, 9})
    desk, dispatch, error = run(cluster, make_units(100))
    assert "5 unit(s) failed 3 times" in str(error)
    assert re.search(r"first u0000[5-9] \(item [5-9]\): ArithmeticError: no square of", str(error))
    assert set(desk.kept) == set(range(100)) - cluster.bad_units
    assert not dispatch.left_out
    for unit in cluster.bad_units:
        assert cluster.executions[unit] == MAX_TRIES
        slots = [slot for name, slot in cluster.placed if name == f"u{unit:05d}"]
        assert len({cluster.slots[slot].node for slot in slots}) == 3  # on three nodes


def test_a_unit_that_kills_its_worker_is_blamed_and_those_behind_it_are_not():
    cluster = SimulatedCluster(cpus(1, 1), deadly={3})
    desk, _, error = run(cluster, make_units(8))
    assert "u00003 (item 3)" in str(error)
    assert desk.kept == Counter(set(range(8)) - {3})
    assert cluster.executions[3] == 1 + MAX_TRIES  # once among others, then alone


def test_a_death_among_several_units_blames_none_and_separates_them():
    cluster = SimulatedCluster(cpus(2, 1), deaths=[(20.0, 0)])
    desk, dispatch, error = run(cluster, make_units(200))
    assert error is None
    assert desk.kept == Counter(range(200))
    assert dispatch.state.failures == 0
    assert not dispatch.blame.records
    apart = dispatch.todo.alone
    assert 1 < len(apart) <= LEASE_SECONDS
    assert all(
        len(lease.units) == 1
        for _, lease, _ in cluster.leases
        if any(unit.name in apart for unit in lease.units)
    )


def test_units_of_a_node_that_is_taken_away_stay_together():
    cluster = SimulatedCluster(cpus(2, 1), deaths=[(20.0, 0), (40.0, 1)], announced=True)
    desk, dispatch, error = run(cluster, make_units(200))
    assert error is None
    assert desk.kept == Counter(range(200))
    assert not dispatch.todo.alone


def test_leases_take_half_a_minute_and_workers_end_together():
    num_workers, number = 64, 20_000
    cluster = SimulatedCluster(cpus(8, 8))
    desk, _, error = run(cluster, make_units(number))
    assert error is None
    assert desk.kept == Counter(range(number))
    assert max(seconds for _, _, seconds in cluster.leases) <= LEASE_SECONDS
    steady = [lease for _, lease, _ in cluster.leases if lease.units[-1].payload < number / 2]
    steady = steady[2 * num_workers :]  # before the first measurement they are small
    assert all(len(lease.units) == LEASE_SECONDS / WORK for lease in steady)
    least = number * WORK / num_workers
    assert START + least <= cluster.now <= START + least + 6 * WORK
    own_units = [unit.payload for _, lease, _ in cluster.leases for unit in lease.units]
    assert sorted(own_units) == list(range(number))
    for _, lease, _ in cluster.leases:  # a run of the plan: its key says which units it has
        assert lease.units[-1].payload - lease.units[0].payload + 1 == len(lease.units)


def test_what_busy_workers_tell_is_shown_before_they_return():
    units = [Unit(f"u{i}", "", i, num_items=8, num_evaluations=400) for i in range(2)]
    cluster = SimulatedCluster(cpus(2, 1), long={0: 30.0, 1: 60.0})
    desk, dispatch, error = run(cluster, units)
    assert error is None
    assert (4.0, 200) in desk.pulses  # both: a quarter of 8 items each
    assert (2.0, 200) in desk.pulses  # the second alone
    counts = [evaluations for _, evaluations in desk.pulses]
    assert counts == sorted(counts)
    assert dispatch.state.under_way <= 2.0


def test_few_units_go_to_all_workers():
    cluster = SimulatedCluster(cpus(2, 4))
    _, _, error = run(cluster, make_units(64))
    assert error is None
    assert cluster.now <= START + 64 / 8 * WORK + 2 * WORK


def test_units_that_a_source_adds_make_whole_leases_too():
    num_items = 2000
    cluster, desk = SimulatedCluster(cpus(2, 4)), Growing(num_items=num_items)
    _, _, error = run(cluster, desk.more(8, ahead=8), desk=desk)
    assert error is None
    assert desk.kept == Counter((item, block) for item in range(num_items) for block in range(3))
    assert len(cluster.leases) <= 1.5 * 3 * num_items * WORK / LEASE_SECONDS
    assert cluster.now <= START + 3 * num_items * WORK / 8 * 1.05
    assert desk.most_ahead <= 2 * 8  # guesses fill free slots only


def test_a_lease_that_takes_too_long_ends_early_and_its_rest_is_given_out_again():
    later = dict.fromkeys(range(100, 200), 20.0)  # the first 100 units promised 1 s each
    cluster = SimulatedCluster(cpus(1, 4), long=later)
    desk, _, error = run(cluster, make_units(200))
    assert error is None
    assert desk.kept == Counter(range(200))
    assert max(seconds for _, _, seconds in cluster.leases) <= STOP_SECONDS + 20
    assert sum(cluster.executions.values()) == 200
    assert cluster.now <= START + (100 + 20 * 100) / 4 * 1.15


def test_a_unit_that_raises_costs_neither_the_units_before_nor_behind_it():
    cluster = SimulatedCluster(cpus(2, 1), bad_units={57})
    desk, dispatch, error = run(cluster, make_units(100))
    assert "1 unit(s) failed 3 times" in str(error)
    assert "u00057 (item 57)" in str(error)
    assert desk.kept == Counter(set(range(100)) - {57})
    assert cluster.executions[57] == MAX_TRIES
    assert dispatch.state.failures == MAX_TRIES
    # Only leases behind it, on the worker that was replaced, are begun again.
    assert all(times == 1 for unit, times in cluster.executions.items() if unit != 57)


def test_a_users_mistake_ends_at_once():
    class Mistaken(SimulatedCluster):
        @staticmethod
        def outcome(lease, done, seconds, how):
            return Outcome(error=CasemateError("model", "x", "is not a model"))

    with pytest.raises(CasemateError, match="is not a model"):
        run(Mistaken(cpus(1, 1)), make_units(3))


def test_work_starts_with_the_first_worker_and_grows_as_nodes_join():
    joins = {1: 100.0, 2: 200.0, 3: 200.0}
    for asked in (4, None):  # a request, or whatever fits
        cluster = SimulatedCluster(cpus(4, 1), joins=joins, asked=asked)
        desk, _, error = run(cluster, make_units(1000))
        assert error is None
        assert desk.kept == Counter(range(1000))
        assert desk.most_ready == 4
        by_slot = Counter(slot for _, slot in cluster.placed)
        assert by_slot[0] > by_slot[1] > by_slot[2] > 0
        few = [text for text in desk.told if "1 worker(s) ready, 3 more" in text]
        assert len(few) == (asked == 4)


def test_waiting_is_told_once_a_minute_and_ends_with_one_line():
    cluster = SimulatedCluster(cpus(1, 1), joins={0: 10_000.0}, asked=3)
    desk, _, error = run(cluster, make_units(10), max_wait=300)
    assert "no worker was ready within cluster.max_wait (300 s): each needs 1 CPU" in str(error)
    assert "\n" not in str(error)
    assert 5 <= len(desk.told) <= 6
    assert desk.told[0] == "waiting for 3 worker(s) since 5 s, none ready: each needs 1 CPU"


def test_never_more_workers_than_units():
    cluster = SimulatedCluster(cpus(1, 8))
    desk, _, error = run(cluster, make_units(3))
    assert error is None
    assert desk.most_ready == 3
    assert len({slot for _, slot in cluster.placed}) == 3  # one for each, not two for the first


def test_workers_that_never_start_end_the_stage():
    cluster = SimulatedCluster(cpus(1, 2), cannot_start=RuntimeError("no torch here"))
    _, _, error = run(cluster, make_units(3))
    assert "workers cannot start: no torch here" in str(error)


@settings(max_examples=150)
@given(st.data())
def test_good_units_are_computed_and_kept_once_whatever_breaks(data):
    make = data.draw(st.sampled_from([cpus, gpus]))
    slots = make(data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3)))
    places = sorted(set(slots), key=str)
    bad_places = data.draw(st.sets(st.sampled_from(places), max_size=len(places) - 1))
    number = data.draw(st.integers(1, 40))
    units = st.sets(st.integers(0, number - 1), max_size=2)
    deaths = data.draw(
        st.lists(
            st.tuples(st.floats(0, 60), st.integers(0, len(slots) - 1)), max_size=2
        )  # fewer than a place can be blamed for
    )
    broken = {i for i, place in enumerate(slots) if place in bad_places}
    first = min(set(range(len(slots))) - broken)  # is there from the start
    late = st.integers(0, len(slots) - 1).filter(lambda slot: slot != first)
    cluster = SimulatedCluster(
        slots,
        broken=broken,
        bad_units=data.draw(units),
        deadly=(deadly := data.draw(units)),
        deaths=deaths,
        joins=data.draw(st.dictionaries(late, st.floats(0, 50), max_size=2 * (len(slots) > 1))),
    )
    desk, dispatch, error = run(cluster, make_units(number))
    good = set(range(number)) - cluster.bad_units - deadly
    assert all(times == 1 for times in desk.kept.values())
    assert dispatch.left_out <= bad_places
    if error is None or "failed 3 times" in str(error):
        lost = good - set(desk.kept)
        # Only places that break everything, or deaths, cost a good unit its three tries.
        assert not lost or len(bad_places) + len(deaths) >= MAX_TRIES
    else:
        assert "no success" in str(error)
        assert sum(cluster.executions.values()) + len(deaths) >= HOPELESS
    assert (error is None) == (set(desk.kept) == set(range(number)))
