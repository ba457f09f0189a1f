"""Leases: how many units they have, when a worker stops, what an error costs."""

import pyarrow as pa
import pytest

from components.core.units import Unit
from pipelines.runtime import leases
from pipelines.runtime.leases import (
    LEASE_SECONDS,
    LEASE_UNITS,
    STOP_SECONDS,
    Lease,
    Pulse,
    Queue,
    under_way,
    work_off,
)


class Clock:
    """Stands still but for the work."""

    now = 0.0

    def __call__(self):
        return self.now


def units(number):
    return [Unit(f"u{i}", f"item {i}", i) for i in range(number)]


def square(payload):
    if payload == "bad":
        raise ArithmeticError("no square")
    return pa.table({"square": [payload**2]})


class Written(list):
    """What was written, one entry per object."""

    def __call__(self, tables, briefs):
        self.append([table["square"][0].as_py() for table in tables])
        self.briefs = briefs
        return f"key-{len(self)}", 10


def test_a_lease_is_one_object_with_its_briefs():
    written = Written()
    brief = lambda table: table["square"].to_pylist()  # noqa: E731
    outcome = work_off(lambda: square, [1, 2, 3], write=written, brief=brief)
    assert written == [[1, 4, 9]]
    assert (outcome.num_done, outcome.group, outcome.num_bytes) == (3, "key-1", 10)
    assert outcome.briefs == written.briefs == [[1], [4], [9]]
    assert outcome.error is None
    assert work_off(lambda: square, [1], write=written, brief=None).briefs is None


def test_a_lease_under_way_counts_finished_units_and_a_share_of_the_next():
    units = [Unit(f"u{i}", "", i, num_items=10, num_evaluations=200) for i in range(3)]
    units[2] = Unit("u2", "", 2, num_items=10)  # how long it takes is not known
    lease = Lease(0, tuple(units))
    assert under_way(lease, Pulse(0, at_hand=0, evaluations=0)) == 0
    assert under_way(lease, Pulse(1, at_hand=50, evaluations=150)) == 12.5
    assert under_way(lease, Pulse(1, at_hand=999, evaluations=1)) == 20  # never more than the unit
    assert under_way(lease, Pulse(2, at_hand=999, evaluations=1)) == 20
    assert under_way(lease, Pulse(3, at_hand=0, evaluations=1)) == 30


def test_the_beginning_of_every_unit_is_told():
    told = []
    work_off(lambda: square, [1, 2, 3], write=Written(), brief=None, begin=told.append)
    assert told == [0, 1, 2]


def test_a_worker_stops_between_two_units_when_its_time_is_up():
    clock, written = Clock(), Written()

    def slow(payload):
        clock.now += 20
        return square(payload)

    outcome = work_off(lambda: slow, [1] * 9, write=written, brief=None, clock=clock)
    assert outcome.num_done == 3  # the first multiple of 20 s beyond the limit
    assert outcome.seconds == 60 >= STOP_SECONDS


def test_a_worker_stops_when_its_results_fill_an_object(monkeypatch):
    monkeypatch.setattr(leases, "LEASE_BYTES", 20)
    assert work_off(lambda: square, [1] * 9, write=Written(), brief=None).num_done == 3


def test_what_is_finished_before_an_error_is_written():
    written = Written()
    outcome = work_off(lambda: square, [1, 2, "bad", 4], write=written, brief=None)
    assert written == [[1, 4]]
    assert outcome.num_done == 2
    assert isinstance(outcome.error, ArithmeticError)
    outcome = work_off(lambda: square, ["bad"], write=written, brief=None)
    assert (outcome.num_done, outcome.group, len(written)) == (0, "", 1)  # no empty object


@pytest.mark.parametrize("what", ["make", "write", "brief"])
def test_other_errors_leave_nothing_finished(what):
    def fails(*_):
        raise OSError(28, "No space left on device")

    outcome = work_off(
        fails if what == "make" else lambda: square,
        [1, 2],
        write=fails if what == "write" else Written(),
        brief=fails if what == "brief" else None,
    )
    assert outcome.num_done == 0
    assert "No space left" in str(outcome.error)


def test_leases_follow_the_measured_time():
    queue = Queue(units(100_000))
    assert len(queue.take(2).units) == 1  # nothing is known yet
    queue.measured(1, 0.5)
    assert len(queue.take(2).units) == 2 * LEASE_SECONDS
    for _ in range(30):  # units become slower
        queue.measured(5, 50.0)
    assert len(queue.take(2).units) == int(LEASE_SECONDS / 10)
    for _ in range(30):
        queue.measured(1, 100.0)
    assert len(queue.take(2).units) == 1
    for _ in range(30):
        queue.measured(10, 0.0)
    assert len(queue.take(2).units) == LEASE_UNITS


def test_leases_are_shares_of_what_is_left():
    queue = Queue(units(1000))
    queue.measured(1000, 1.0)
    sizes = []
    while queue:
        sizes.append(len(queue.take(5).units))
    assert sum(sizes) == 1000
    assert sizes[0] == 100
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-10:] == [1] * 10


def test_units_of_a_dead_worker_go_alone_and_keep_their_order():
    queue = Queue(units(60))
    queue.measured(1000, 1.0)
    lease = queue.take(1)
    assert len(lease.units) == 30
    queue.separate([unit.name for unit in lease.units[:3]])
    for unit in reversed(lease.units):
        queue.give_back(unit)
    taken = [[unit.payload for unit in queue.take(1).units] for _ in range(4)]
    assert taken[:3] == [[0], [1], [2]]
    assert taken[3] == list(range(3, 31))
