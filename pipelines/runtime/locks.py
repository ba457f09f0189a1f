"""Locks of a storage without file locks: a log of entries, each created by one writer only.

`locks/<name>/<n>.json` is entry n. Entry n + 1 renews the lock, takes it over or releases it: they
all compete for one key and one of them wins, so a holder that lost its lock learns it when it
renews. The number of the entry that acquired the lock is its fencing number: it grows from holder
to holder.

An entry expires `ttl` seconds after it was written, by the clock of the storage. A holder of the
same machine whose process is gone is replaced at once.
"""

import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self
from uuid import uuid4

from components.core.digests import canonical_json
from components.core.documents import parse_json
from pipelines.runtime.store import Listed, Store
from pipelines.runtime.store_errors import DamagedError, StoreError, UnavailableError

LOCKS = "locks"
TTL = 90.0  # seconds; stamps of S3 are whole seconds, so not below 30 on a bucket
KEPT = 10  # entries that stay when old ones are removed
HELD, FREE = "held", "free"


class LockedError(StoreError):
    """Another process holds the lock."""


class LostLockError(StoreError):
    """Another process took the lock over; what this one would write may not count any more."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who wrote an entry; `machine` tells whether its process can be looked up from here."""

    host: str
    machine: str
    pid: int
    started: str
    token: str

    @classmethod
    def here(cls) -> Self:
        pid = os.getpid()
        return cls(socket.gethostname(), _machine(), pid, _start_of(pid) or "", uuid4().hex)

    def is_gone(self) -> bool:
        """Whether the process is known to have ended; False for one of another machine."""
        return self.machine == _machine() and not _lives(self.pid, self.started)


@dataclass(frozen=True, slots=True)
class Entry:
    """The newest entry of a lock; `age` in seconds, by the clock of the storage."""

    number: int
    state: str
    ttl: float
    age: float
    holder: Holder

    @property
    def is_held(self) -> bool:
        return self.state == HELD and self.age < self.ttl and not self.holder.is_gone()

    def __str__(self) -> str:
        return f"host {self.holder.host}, pid {self.holder.pid}, last sign {self.age:.0f} s ago"


def newest_entry(store: Store, name: str) -> Entry | None:
    """The newest entry of a lock; None for a lock that was never used.

    The clock of the storage is measured, which writes to it.
    """
    while listed := _entries(store, name):
        newest = listed[-1]
        content = store.find(newest.key)
        if content is not None:  # else removed meanwhile: there is a newer one
            age = max(0.0, time.time() + store.clock_skew - newest.modified)
            return parse_entry(store.where(newest.key), _number_of(newest.key), content, age)
    return None


def _entries(store: Store, name: str) -> list[Listed]:
    """The entries of a lock, the newest one last."""
    folder = f"{LOCKS}/{name}"
    direct = [one for one in store.listing(folder) if one.key.rpartition("/")[0] == folder]
    return sorted(direct, key=lambda one: _number_of(one.key))


def parse_entry(where: str, number: int, content: bytes, age: float) -> Entry:
    """An entry from its content; `where` is for the message about a damaged one."""
    try:
        found = parse_json(content)
        holder = Holder(**found["holder"])
        return Entry(number, str(found["state"]), float(found["ttl"]), age, holder)
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(where, "is not an entry of a lock; delete it") from error


class Lock:
    """A lock of a storage, held inside a `with` block and renewed by a thread.

    `wait` is how many seconds to wait for another holder; 0 refuses at once. `tell` gets one line
    when the waiting begins.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        *,
        ttl: float = TTL,
        wait: float = 0.0,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.store = store
        self.name = name
        self.ttl = ttl
        self.wait = wait
        self.tell = tell
        self.fence = 0
        """The fencing number; 0 while the lock is not held."""
        self._holder = Holder.here()
        self._number = 0  # of the newest own entry
        self._renewed = 0.0  # when that was written, at the latest
        self._lost = False
        self._busy = threading.Lock()  # one renewal at a time
        self._stop = threading.Event()

    def acquire(self) -> Self:
        """Hold the lock, or raise `LockedError` with one line on its holder."""
        until, told = _now() + self.wait, self.tell is None
        self._holder, self._lost, self.fence = Holder.here(), False, 0
        while True:
            newest = newest_entry(self.store, self.name)
            if newest is None or not newest.is_held:
                if self._append(newest.number + 1 if newest else 1):
                    return self
                continue  # another process was faster: see who
            if _now() >= until:
                left = max(0.0, newest.ttl - newest.age)
                remedy = f"is held by {newest}; wait for it or stop it (it expires in {left:.0f} s)"
                raise LockedError(self._where, remedy)
            if self.tell and not told:
                self.tell(f"waiting for {self._where}, held by {newest}")
                told = True
            time.sleep(min(1.0, self.ttl / 10))

    def renew(self) -> bool:
        """Write the next entry; False if another process took over."""
        with self._busy:
            if not self._lost and not self._append(self._number + 1):
                self._lost = True
            elif self._number % (2 * KEPT) == 0:
                self._remove_old()
            return not self._lost

    def check(self) -> None:
        """Raise `LostLockError` unless the lock is held; call it before anything is published."""
        if _now() - self._renewed > self.ttl:  # this process was suspended, or the storage away
            self.renew()
        if self._lost:
            newest = newest_entry(self.store, self.name)
            remedy = f"was taken over ({newest}); this run stops, the other one continues"
            raise LostLockError(self._where, remedy)

    def release(self) -> None:
        """Let others have the lock; nothing if it was lost."""
        self._stop.set()
        with self._busy:
            if self.fence and not self._lost and self._holder.pid == os.getpid():
                self._append(self._number + 1, FREE)
                self._remove_old()
            self.fence = 0

    def __enter__(self) -> Self:
        self.acquire()
        self._stop.clear()
        threading.Thread(target=self._keep, name=f"lock {self.name}", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.release()
        except UnavailableError:  # the entry expires by itself
            self._stop.set()

    def _keep(self) -> None:
        """Renew three times as often as needed until the lock is released or lost."""
        while not self._stop.wait(self.ttl / 3):
            try:
                if not self.renew():
                    return
            except UnavailableError:
                continue  # `check` counts the time since the last renewal

    def _append(self, number: int, state: str = HELD) -> bool:
        """Write entry `number`; False if another process was first, or is ahead by now.

        An old entry may have been removed since this process looked, so that creating it again
        succeeds: hence the second look.
        """
        key, now = f"{LOCKS}/{self.name}/{number:09d}.json", _now()
        entry = {"state": state, "ttl": self.ttl, "holder": asdict(self._holder)}
        if not self.store.put_new(key, canonical_json(entry).encode()):
            return False
        if any(_number_of(one.key) > number for one in _entries(self.store, self.name)):
            self.store.delete([key])
            return False
        self.fence = self.fence or number
        self._number, self._renewed = number, now
        return True

    def _remove_old(self) -> None:
        keys = [one.key for one in _entries(self.store, self.name)]
        self.store.delete([key for key in keys if _number_of(key) <= self._number - KEPT])

    @property
    def _where(self) -> str:
        return self.store.where(f"{LOCKS}/{self.name}")


def _number_of(key: str) -> int:
    """The number of an entry; 0 for a key that is not one."""
    stem = key.rpartition("/")[2].removesuffix(".json")
    return int(stem) if stem.isdecimal() else 0


def _now() -> float:
    """Seconds that also count while the machine is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _machine() -> str:
    """This boot and its process namespace: containers of one machine do not see each other."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    try:
        return f"{boot.read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return uuid4().hex  # unknown: equal to no other


def _start_of(pid: int) -> str | None:
    """When a process started, in ticks since the boot; None if it ended or cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _lives(pid: int, started: str) -> bool:
    """Whether a process of this machine still runs; another one with its number does not count."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    now = _start_of(pid)
    return now is not None and (now == started or not started)
