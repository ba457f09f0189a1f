"""Locks as a log, on a folder and on a real S3 server: one holder, takeover, fencing, release."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from pipelines.runtime import locks
from pipelines.runtime.locks import Holder, Lock, LockedError, LostLockError, newest_entry
from pipelines.runtime.store import DamagedError, Store
from tests.store_processes import count_under_lock, die_with_lock, killed, lock, together


@pytest.fixture(params=["folder", "s3"])
def store(request, tmp_path):
    root = request.getfixturevalue("s3_root") if request.param == "s3" else tmp_path / "runs"
    return Store(root)


def elsewhere(lock):
    """The lock as a process of another machine would hold it."""
    lock.acquire()
    key = f"locks/{lock.name}/{lock.fence:09d}.json"
    entry = json.loads(lock.store.get(key))
    entry["holder"] |= {"host": "far", "machine": "another boot", "pid": 7}
    lock.store.delete([key])
    lock.store.put_new(key, json.dumps(entry).encode())
    return lock


def test_a_lock_has_one_holder_at_a_time(store):
    with Lock(store, "flow") as first:
        assert first.fence == 1
        with pytest.raises(LockedError) as error, Lock(store, "flow"):
            pass
        text = str(error.value)
        assert f"pid {os.getpid()}, last sign" in text
        assert "host " in text
        assert "\n" not in text
        with Lock(store, "other flow") as other:
            assert other.fence == 1
    assert newest_entry(store, "flow").state == "free"
    with Lock(store, "flow") as second:
        assert second.fence > 1
        second.check()


def test_renewals_keep_the_fencing_number_and_few_entries(store):
    held = Lock(store, "flow", ttl=60).acquire()
    for _ in range(25):
        assert held.renew()
    assert held.fence == 1
    assert newest_entry(store, "flow").number == 26
    assert len(store.listing("locks/flow")) <= 2 * locks.KEPT
    held.release()
    assert len(store.listing("locks/flow")) <= locks.KEPT
    assert Lock(store, "flow").acquire().fence == 28


def test_an_expired_lock_is_taken_over_and_its_holder_learns_it(store, monkeypatch):
    old = elsewhere(Lock(store, "flow", ttl=30))
    with pytest.raises(LockedError, match="host far, pid 7"):
        Lock(store, "flow").acquire()
    store._clock_skew = store.clock_skew + 32  # the clock of the storage goes on
    new = Lock(store, "flow", ttl=30).acquire()
    assert new.fence == old.fence + 1
    assert not old.renew()
    with pytest.raises(LostLockError, match=r"was taken over \(host ") as error:
        old.check()
    assert "\n" not in str(error.value)
    old.release()  # leaves the lock of the other alone
    new.check()
    assert newest_entry(store, "flow").number == new.fence


def test_a_holder_that_slept_looks_before_it_goes_on(store, monkeypatch):
    held = Lock(store, "flow", ttl=30).acquire()
    now = locks._now
    monkeypatch.setattr(locks, "_now", lambda: now() + 31)
    held.check()  # still ours: renewed
    assert newest_entry(store, "flow").number == held.fence + 1
    elsewhere_key = f"locks/flow/{held.fence + 2:09d}.json"
    entry = {"state": "held", "ttl": 30, "holder": {**HOLDER, "token": "x"}}
    store.put_new(elsewhere_key, json.dumps(entry).encode())
    monkeypatch.setattr(locks, "_now", lambda: now() + 100)
    with pytest.raises(LostLockError, match="host far"):
        held.check()


HOLDER = {"host": "far", "machine": "m", "pid": 7, "started": "1"}


def test_a_slow_writer_does_not_win_with_an_entry_that_was_removed(store):
    """It saw entry 1, then others went on to entry 30 and removed the old ones."""
    slow = Lock(store, "flow", ttl=60)
    holder = elsewhere(Lock(store, "flow", ttl=60))
    for _ in range(30):
        holder.renew()
    assert store.find("locks/flow/000000002.json") is None
    assert not slow._append(2)
    assert store.find("locks/flow/000000002.json") is None
    assert holder.renew()


def test_a_killed_holder_of_this_machine_is_replaced_at_once(store):
    killed(die_with_lock, store.root, "flow")
    assert newest_entry(store, "flow").age < newest_entry(store, "flow").ttl
    assert Lock(store, "flow").acquire().fence == 2


def test_a_stopped_or_unreaped_process_and_a_reused_number(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    here = Holder.here()
    started = locks._start_of(process.pid)
    child = Holder(here.host, here.machine, process.pid, started, "t")
    assert not here.is_gone()
    process.send_signal(signal.SIGSTOP)
    assert not child.is_gone()
    assert Holder(here.host, here.machine, process.pid, "12", "t").is_gone()  # another process
    assert not Holder(here.host, "another boot", process.pid, "12", "t").is_gone()  # unknown
    process.kill()
    while locks._start_of(process.pid) is not None:
        time.sleep(0.01)
    assert child.is_gone()  # a zombie
    process.wait()
    assert child.is_gone()


def test_a_thread_renews_the_lock(store):
    with Lock(store, "flow", ttl=0.3) as held:
        deadline = time.monotonic() + 60
        while newest_entry(store, "flow").number < 4:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert held.fence == 1
    number = newest_entry(store, "flow").number
    time.sleep(0.5)
    assert newest_entry(store, "flow").number == number  # none after the release


def test_a_forked_child_does_not_release_the_lock(tmp_path):
    with Lock(Store(tmp_path), "flow") as held:
        child = os.fork()
        if not child:
            held.release()
            os._exit(0)
        os.waitpid(child, 0)
        assert newest_entry(held.store, "flow").is_held
        held.check()


def test_waiting_ends_with_the_release(store):
    held = Lock(store, "flow", ttl=60).acquire()
    told = []
    waited = Lock(store, "flow", ttl=60, wait=60, tell=told.append)
    thread = threading.Thread(target=waited.acquire)
    thread.start()
    time.sleep(0.3)
    assert waited.fence == 0
    held.release()
    thread.join(timeout=60)
    assert waited.fence == 3
    assert len(told) == 1
    assert f"held by host {os.uname().nodename}, pid {os.getpid()}" in told[0]
    with pytest.raises(LockedError, match="is held by"):
        Lock(store, "flow", wait=0.2).acquire()


def test_of_eight_processes_one_gets_the_lock(store):
    rounds = 4
    seen = together(lock, store.root, rounds, number=8)
    for index in range(rounds):
        assert sorted(one[index] for one in seen) == [0] * 7 + [1]


def test_nothing_is_lost_between_processes_that_wait(tmp_path):
    counter = tmp_path / "counter"
    counter.write_text("0")
    seen = together(count_under_lock, str(tmp_path / "runs"), str(counter), 3, number=4)
    assert counter.read_text() == "12"
    fences = [fence for one in seen for fence in one]
    assert len(set(fences)) == 12


def test_a_damaged_entry_is_named(tmp_path):
    store = Store(tmp_path)
    store.put_new("locks/flow/000000001.json", b"{")
    with pytest.raises(DamagedError, match=r"000000001.json is not an entry of a lock; delete it"):
        Lock(store, "flow").acquire()
