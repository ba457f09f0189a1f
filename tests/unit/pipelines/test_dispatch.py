"""The loop of the executor on simulated workers: who is blamed, what is lost, when it ends."""

import heapq
import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import count

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.core.errors import CasemateError
from components.core.units import Unit
from pipelines.runtime.crew import Finished, Lost, NotStarted, Place, Raised, Ready, Worker
from pipelines.runtime.dispatch import HOPELESS, MAX_TRIES, Dispatch, ShardFailedError

TABLE = pa.table({"x": [1]})
START, WORK = 3.0, 1.0  # seconds of a start and of a unit
FAIL = 0.01  # a broken device fails at once


def make_units(number):
    return [Unit(f"u{i:05d}", f"item {i}", i) for i in range(number)]


@dataclass
class SimulatedCluster:
    """Slots that come and break; a worker per slot, its units one after the other."""

    slots: list[Place]
    broken: set[int] = field(default_factory=set)  # slots on which every unit raises
    bad_units: set[int] = field(default_factory=set)  # raise everywhere
    deadly: set[int] = field(default_factory=set)  # kill their worker
    deaths: list[tuple[float, int]] = field(default_factory=list)  # of the worker in a slot
    joins: dict[int, float] = field(default_factory=dict)  # when a slot exists; else from the start
    asked: int | None = None
    cannot_start: BaseException | None = None

    def __post_init__(self):
        self.now, self.numbers, self.ties = 0.0, count(1), count()
        self.events = []  # (time, tie, what)
        self.waiting: list[set[str]] = []  # requests without a slot, with the nodes to avoid
        self.taken: dict[int, int] = {}  # slot -> worker that starts or works there
        self.starting: set[int] = set()
        self.slot_of: dict[int, int] = {}
        self.queues: dict[int, list[Unit]] = {}
        self.executions: Counter[int] = Counter()
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
        for unit in self.queues.pop(worker.number, []):
            self._at(self.now, ("lost", worker, unit))
        if hold:
            return
        if worker.number in self.slot_of:
            self._free(worker.number)
            self._place()

    def send(self, worker, unit):
        assert worker.number not in self.starting
        if worker.number not in self.queues:  # dead, and the loop does not know yet
            self._at(self.now, ("lost", worker, unit))
            return
        self.queues[worker.number].append(unit)
        if len(self.queues[worker.number]) == 1:
            self._begin(worker)

    def _begin(self, worker):
        unit, slot = self.queues[worker.number][0], self.slot_of[worker.number]
        fails = slot in self.broken or unit.payload in self.bad_units
        self._at(self.now + (FAIL if fails else WORK), ("end", worker, unit, fails))

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
                worker, unit = about
                return Lost(worker, unit, RuntimeError("the actor died"))
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
        for unit in reversed(held):  # the order in which calls fail is not that of their starts
            self._at(self.now, ("lost", worker, unit))

    def _ended(self, worker, unit, fails):
        self.executions[unit.payload] += 1
        self.placed.append((unit.name, self.slot_of[worker.number]))
        if unit.payload in self.deadly:
            return self._die(worker)
        self.queues[worker.number].pop(0)
        if self.queues[worker.number]:
            self._begin(worker)
        if fails:
            return Raised(worker, unit, ArithmeticError(f"no square of {unit.payload}"))
        return Finished(worker, unit, TABLE)


@dataclass
class Desk:
    kept: Counter = field(default_factory=Counter)
    told: list[str] = field(default_factory=list)
    most_ready: int = 0

    def more(self, room):
        return ()

    def keep(self, unit, table):
        self.kept[unit.payload] += 1

    def look(self, state):
        self.most_ready = max(self.most_ready, state.ready)
        assert state.ready <= max(state.wanted, state.ready)

    def tell(self, text):
        self.told.append(text)


def run(cluster, units, *, max_wait=1800.0):
    desk = Desk()
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
    assert cluster.executions[3] == MAX_TRIES


def test_a_users_mistake_ends_at_once():
    class Mistaken(SimulatedCluster):
        def _ended(self, worker, unit, fails):
            return Raised(worker, unit, CasemateError("model", "x", "is not a model"))

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
