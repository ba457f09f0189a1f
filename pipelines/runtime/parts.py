"""Durable results of work units, found again by a second start without reading them.

The units of one call are a plan; results of a lease are one object below the plan's folder. Its key
says which units it holds by their ordinals in the plan, and the digest of its content:

    <prefix>/<plan>/<first>-<last>-<count>-<digest>.arrow

If count = last - first + 1, a listing says it all; otherwise the end of the object does, as for
units that a source has added to the plan (`named-<count>-<digest>.arrow`).
"""

import hashlib
import re
import time
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from components.core.digests import digest_json
from components.core.errors import CasemateError, first_line
from components.core.units import BriefFn
from pipelines.runtime.groups import End, Group, GroupError, pack, read_end
from pipelines.runtime.store import Store, open_store
from pipelines.runtime.store_errors import UnavailableError

SUFFIX = ".arrow"
RUN = re.compile(r"(\d{9})-(\d{9})-(\d{6})-([0-9a-f]{16})\.arrow")
NAMED = re.compile(r"named-(\d{6})-([0-9a-f]{16})\.arrow")
REMEDY = "delete this file to compute it again, or use --force"
OPEN_GROUPS = 4  # in memory
OPEN_ENDS = 64  # with decoded briefs
THREADS = 16  # that read ends of objects
PAUSES = (1.0, 3.0, 10.0, 30.0, 60.0)  # seconds, while the storage does not answer


@dataclass(frozen=True, slots=True)
class PlanWriter:
    """Stores the results of leases; workers get a copy."""

    store: Store
    folder: str
    run_id: str

    def write(
        self,
        names: Sequence[str],
        ordinals: Sequence[int] | None,
        tables: Sequence[pa.Table],
        briefs: Sequence[Any] | None,
    ) -> tuple[str, int]:
        """Store finished units as one object; its key and its size."""
        content = pack(names, tables, run_id=self.run_id, briefs=briefs)
        digest = digest_of(content)
        name = f"named-{len(names):06d}-{digest}{SUFFIX}"
        if ordinals is not None:
            first, last = min(ordinals), max(ordinals)
            name = f"{first:09d}-{last:09d}-{len(ordinals):06d}-{digest}{SUFFIX}"
        key = f"{self.folder}/{name}"
        self._put(key, content)
        return key, len(content)

    def _put(self, key: str, content: bytes) -> None:
        """Write it, or wait for the storage: what is computed is worth more than a minute."""
        for pause in PAUSES:
            try:
                self.store.put_same(key, content)
            except UnavailableError:
                time.sleep(pause)
            else:
                return
        self.store.put_same(key, content)


def digest_of(content: bytes) -> str:
    """The digest in the key of a group."""
    return hashlib.sha256(content).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class _Stored:
    """A group by its key."""

    key: str
    num_bytes: int
    expected: tuple[str, ...] | None  # its units, if known from elsewhere than its end


class PartStore:
    """The results of one step. `run_id` is its fingerprint: results of other work are refused."""

    def __init__(self, store: Store, prefix: str, *, run_id: str) -> None:
        self.store, self.prefix, self.run_id = store, prefix, run_id
        self.groups: list[_Stored] = []
        self.plans: dict[str, Plan] = {}
        self._open: OrderedDict[int, Group] = OrderedDict()
        self._has_scanned = False

    @staticmethod
    def in_folder(folder: Path, *, run_id: str) -> "PartStore":
        """Results in a folder of this machine."""
        return PartStore(open_store(folder.parent), folder.name, run_id=run_id)

    def plan(self, names: Sequence[str]) -> "Plan":
        """The plan of these units, with what earlier starts have finished of it."""
        key = digest_json([self.run_id, list(names)])[:8]
        if key not in self.plans:
            self.plans[key] = Plan(self, f"{self.prefix}/{key}", names)
            self.plans[key].find()
        return self.plans[key]

    def has(self, unit: str) -> bool:
        """Whether a unit is finished."""
        return self._home(unit) is not None

    def load(self, unit: str) -> pa.Table:
        """The result of a finished unit."""
        number = self._home(unit)
        if number is None:
            raise CasemateError("part", unit, "has no stored result; run the step again")
        return self.group(number).table(unit)

    def tables(self, units: Iterable[str]) -> Iterator[pa.Table]:
        """The results of these units, in their order."""
        return (self.load(unit) for unit in units)

    def all_tables(self) -> Iterator[tuple[str, pa.Table]]:
        """All units with their results, group by group, each unit once.

        A unit may have been computed twice, by a worker that was thought dead: equal results are
        one, different ones an error.
        """
        if not self.plans:
            self._scan()
        for number, stored in enumerate(self.groups):
            for unit, table in self._read(stored):  # one group in memory at a time
                home = self._home(unit)
                if home == number:
                    yield unit, table
                elif home is not None and not self.group(home).table(unit).equals(table):
                    both = " and ".join(
                        self.store.where(self.groups[n].key) for n in (home, number)
                    )
                    remedy = f"has two different results, in {both}; compute it again with --force"
                    raise CasemateError("part", unit, remedy)

    def _home(self, unit: str) -> int | None:
        """The number of the group that holds a unit."""
        for plan in reversed(self.plans.values()):
            if (number := plan.home(unit)) is not None:
                return number
        if self._has_scanned:
            return None
        self._scan()
        return self._home(unit)

    def _scan(self) -> None:
        """Find the plans of earlier starts: this store was opened to read."""
        self._has_scanned = True
        folders = {listed.key.rpartition("/")[0] for listed in self.store.listing(self.prefix)}
        for folder in sorted(folders):
            key = folder.rpartition("/")[2]
            if key not in self.plans:
                plan = Plan(self, folder, [])
                plan.find()
                self.plans = {key: plan, **self.plans}

    def add_group(self, key: str, num_bytes: int, expected: Sequence[str] | None) -> int:
        """The number of a further group."""
        self.groups.append(_Stored(key, num_bytes, None if expected is None else tuple(expected)))
        return len(self.groups) - 1

    def group(self, number: int) -> Group:
        """A group, checked against its key; a few are kept in memory."""
        if number not in self._open:
            while len(self._open) >= OPEN_GROUPS:
                self._open.popitem(last=False)
            self._open[number] = self._read(self.groups[number])
        self._open.move_to_end(number)
        return self._open[number]

    def _read(self, stored: _Stored) -> Group:
        content = self.store.get(stored.key)
        if digest_of(content) != stored.key.rpartition("-")[2].removesuffix(SUFFIX):
            raise self._refused(stored.key, "is damaged (it does not match its own digest)")
        try:
            group = Group(content)
        except (GroupError, pa.ArrowException, KeyError, ValueError, zlib.error) as error:
            raise self._refused(stored.key, f"is damaged ({first_line(error)})") from error
        self._check(stored, group.end)
        return group

    def end(self, number: int) -> End:
        """The end of a group; no other part of it is read."""
        stored = self.groups[number]
        try:
            end = read_end(
                lambda start, length: self.store.get_range(stored.key, start, length),
                stored.num_bytes,
            )
        except (GroupError, KeyError, ValueError, zlib.error) as error:
            raise self._refused(stored.key, f"is damaged ({first_line(error)})") from error
        self._check(stored, end)
        return end

    def ends(self, numbers: Sequence[int]) -> Iterator[End]:
        """The ends of these groups, read by several threads."""
        if not numbers:
            return
        with ThreadPoolExecutor(THREADS) as readers:
            yield from readers.map(self.end, numbers)

    def _check(self, stored: _Stored, end: End) -> None:
        same_units = stored.expected is None or end.units == stored.expected
        if end.run_id != self.run_id or not same_units:
            raise self._refused(stored.key, "belongs to other work")

    def _refused(self, key: str, text: str) -> CasemateError:
        return CasemateError("part", self.store.where(key), f"{text}; {REMEDY}")


class Plan:
    """The units of one call, and where the results of the finished ones are."""

    def __init__(self, parts: PartStore, folder: str, names: Sequence[str]) -> None:
        self.parts, self.names = parts, names
        self.writer = PlanWriter(parts.store, folder, parts.run_id)
        self.homes = np.full(len(names), -1, np.int32)  # the group of every unit
        self.named: dict[str, int] = {}  # the groups of further units
        self._ends: dict[int, End] = {}  # of named groups
        self._briefs: OrderedDict[int, list[Any] | None] = OrderedDict()

    @cached_property
    def ordinals(self) -> dict[str, int]:
        """The ordinals of the units by name."""
        found = {name: ordinal for ordinal, name in enumerate(self.names)}
        assert len(found) == len(self.names), "two units of a plan have the same name"
        return found

    def ordinals_of(self, names: Sequence[str]) -> list[int] | None:
        """The ordinals of these units; None if one is not in the plan."""
        known = self.ordinals
        return [known[name] for name in names] if all(name in known for name in names) else None

    def find(self) -> None:
        """Learn from a listing, and from the ends of ragged groups, what is finished."""
        unknown = []
        for listed in self.parts.store.listing(self.writer.folder):
            name = listed.key.rpartition("/")[2]
            if not name.endswith(SUFFIX):
                continue
            units: Sequence[str] | None = None
            if found := RUN.fullmatch(name):
                first, last, count = (int(found[place]) for place in (1, 2, 3))
                if count == last - first + 1 and last < len(self.names):
                    units = self.names[first : last + 1]
            elif not NAMED.fullmatch(name):
                raise CasemateError(
                    "part", self.parts.store.where(listed.key), f"is not a result; {REMEDY}"
                )
            number = self.parts.add_group(listed.key, listed.bytes, units)
            if units is None:
                unknown.append(number)
            else:
                self._settle(number, first, last)
        for number, end in zip(unknown, self.parts.ends(unknown), strict=True):
            self._register(number, end.units)
            if any(unit in self.named for unit in end.units):
                self._ends[number] = end

    def _settle(self, number: int, first: int, last: int) -> None:
        """Record a group of consecutive units; the first group of a unit stays its home."""
        homes = self.homes[first : last + 1]
        homes[homes < 0] = number

    def _register(self, number: int, units: Sequence[str]) -> None:
        for unit in units:
            ordinal = self.ordinals.get(unit)
            if ordinal is None:
                self.named.setdefault(unit, number)
            elif self.homes[ordinal] < 0:
                self.homes[ordinal] = number

    def add(self, key: str, num_bytes: int, units: Sequence[str]) -> None:
        """Record units that a worker has stored."""
        number = self.parts.add_group(key, num_bytes, units)
        ordinals = self.ordinals_of(units)
        if ordinals and ordinals[-1] - ordinals[0] + 1 == len(ordinals):
            self._settle(number, ordinals[0], ordinals[-1])
        else:
            self._register(number, units)

    def home(self, unit: str) -> int | None:
        """The number of the group that holds a unit."""
        ordinal = self.ordinals.get(unit)
        if ordinal is None:
            return self.named.get(unit)
        return int(self.homes[ordinal]) if self.homes[ordinal] >= 0 else None

    def has(self, unit: str) -> bool:
        """Whether a unit is finished."""
        return self.home(unit) is not None

    def finished(self) -> NDArray[np.bool_]:
        """Which units of the plan are finished, by ordinal."""
        done: NDArray[np.bool_] = self.homes >= 0
        return done

    def briefs(self, of: BriefFn) -> Iterator[tuple[int, Any]]:
        """The ordinals of all finished units with their briefs, from the ends of their groups."""
        numbers = [int(number) for number in np.unique(self.homes[self.homes >= 0])]
        for number, end in zip(numbers, self.parts.ends(numbers), strict=True):
            notes = end.briefs()
            for place, unit in enumerate(end.units):
                ordinal = self.ordinals.get(unit)
                if ordinal is None or self.homes[ordinal] != number:
                    continue
                yield ordinal, of(self.parts.load(unit)) if notes is None else notes[place]

    def brief(self, unit: str, of: BriefFn) -> Any:
        """The brief of a finished unit."""
        number = self.home(unit)
        assert number is not None, f"{unit} is not finished"
        if number not in self._ends:
            self._ends[number] = self.parts.end(number)
        if number not in self._briefs:
            while len(self._briefs) >= OPEN_ENDS:
                self._briefs.popitem(last=False)
            self._briefs[number] = self._ends[number].briefs()
        self._briefs.move_to_end(number)
        notes = self._briefs[number]
        if notes is None:
            return of(self.parts.load(unit))
        return notes[self._ends[number].places[unit]]
