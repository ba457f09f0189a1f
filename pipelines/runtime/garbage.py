"""What may be removed from a storage, and its removal: all that no current manifest names.

Kept: finished steps and the generations that finished steps were made from, steps in use,
unfinished steps that changed lately, and every key that is not of a flow. A step is changed under
its lock, after another look at it. The manifest of an earlier generation goes before its files,
and the claim of a generation last: a removal that is killed leaves no manifest without files, and
no earlier generation that counts again.
"""

import re
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipelines.runtime.folder_backend import ABANDONED, WRITING
from pipelines.runtime.inventory import (
    Inventory,
    LockLog,
    StoredStep,
    is_earlier,
    relisted,
)
from pipelines.runtime.locks import LOCKS, Lock, LockedError, LostLockError, newest_entry
from pipelines.runtime.step_locks import hold
from pipelines.runtime.storage import FILES, GENERATIONS, SCRATCH, StepPlace, is_numbered
from pipelines.runtime.store import Listed, Store

EARLIER = "earlier generation"
UNNAMED = "in no manifest"
LEFT = "scratch of a finished step"
GIVEN_UP = "unfinished"
OLD_LOCK = "old lock entries"
PROBE = "left by a probe"
TORN = "left by a killed write"
NO_STEP = "of a step that is gone"
CONTENT = re.compile(rf"{FILES}/[0-9a-f]{{20}}/.+")
ANNOUNCED = re.compile(r"shared/[0-9a-f]{64}/[0-9a-f]{16}")
PROBE_KEY = re.compile(r"(?:probes/[0-9a-f]{32}|probes/doctor-[0-9a-f]{12}/.+)")
AT_ONCE = 1000  # keys that are deleted between two looks at the lock


@dataclass(frozen=True, slots=True)
class Garbage:
    """Keys of one place that may go for one reason, in the order of their removal."""

    place: str
    reason: str
    listed: Sequence[Listed]

    @property
    def keys(self) -> list[str]:
        return [one.key for one in self.listed]

    @property
    def bytes(self) -> int:
        return sum(one.bytes for one in self.listed)

    @staticmethod
    def of(place: str, reason: str, listed: Sequence[Listed]) -> "list[Garbage]":
        """One entry, or none without keys."""
        return [Garbage(place, reason, listed)] if listed else []


@dataclass(frozen=True, slots=True)
class Findings:
    """Garbage of a storage; `kept` says what was left alone, and why."""

    garbage: tuple[Garbage, ...]
    kept: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """When unfinished work counts as given up."""

    now: float  # by the clock of the storage
    older_than: float  # seconds
    is_read: bool  # flows run, which may read earlier generations
    inputs: frozenset[str]  # contents that finished steps were made from

    def passed(self, modified: float) -> bool:
        return self.now - modified >= self.older_than


def find_garbage(found: Inventory, *, older_than: float) -> Findings:
    """What may be removed; `older_than` are the seconds without a change of unfinished work."""
    limits = _limits(found, older_than, skew=0.0)
    garbage: list[Garbage] = []
    for step in found.steps.values():
        garbage += step_garbage(step, limits)
    places = {entry.place for entry in garbage}
    for log in found.locks.values():
        if log.name not in places:  # a step's own is removed with the rest
            garbage += _old_entries(log, found, limits)
    garbage += _leftovers(found, limits.now)
    garbage += _announcements(found, limits.now)
    return Findings(tuple(garbage), tuple(_kept(found, limits)))


def remove_garbage(found: Inventory, *, older_than: float) -> Findings:
    """Remove what `find_garbage` finds, unless it has changed meanwhile; returns what has gone."""
    store = found.storage.store
    limits = _limits(found, older_than, skew=store.clock_skew)
    planned = find_garbage(found, older_than=older_than)
    gone: list[Garbage] = []
    kept = list(planned.kept)
    for place in dict.fromkeys(entry.place for entry in planned.garbage):
        if place in found.steps and any(step_garbage(found.steps[place], limits)):
            try:
                gone += _remove_from_step(found.steps[place], limits)
            except (LockedError, LostLockError):
                kept.append(f"{place}: in use")
    for entry in planned.garbage:
        if entry.reason == OLD_LOCK:
            gone += _remove_entries(store, entry, found)
        elif entry.place not in found.steps:
            store.delete(entry.keys)
            gone.append(entry)
    return Findings(tuple(gone), tuple(kept))


def _limits(found: Inventory, older_than: float, *, skew: float) -> Limits:
    is_read = any(log.newest.is_held for log in found.locks.values())
    manifests = [step.manifest for step in found.steps.values() if step.manifest]
    inputs = frozenset(one["content"] for m in manifests for one in m.inputs.values())
    return Limits(time.time() + skew, older_than, is_read, inputs)


def _kept(found: Inventory, limits: Limits) -> Iterable[str]:
    for step in found.steps.values():
        if step.in_use:
            yield f"{step.place.key}: in use"
        elif step.damage is not None:
            yield f"{step.place.key}: its manifest is damaged"
        elif limits.is_read and _earlier_manifests(step):
            yield f"{step.place.key}: earlier generations, which running flows may read"
        elif needed := _needed(step, limits):
            numbers = ", ".join(str(int(name.partition(".")[0])) for name in needed)
            yield f"{step.place.key}: generation {numbers}, an input of finished steps"


# -- steps


def step_garbage(step: StoredStep, limits: Limits) -> list[Garbage]:
    """What may be removed from a step, in order."""
    if step.in_use or step.damage is not None:
        return []
    return _beside_finished(step, limits) if step.finished else _given_up(step, limits)


def _beside_finished(step: StoredStep, limits: Limits) -> list[Garbage]:
    """All that is not of the current generation; files of a folder that people see stay."""
    needed = _needed(step, limits)
    stays = step.current.union(needed, *(step.files_of(step.earlier[name]) for name in needed))
    others = [name for name in step.names if name not in stays]
    manifests = [name for name in _earlier_manifests(step) if name not in needed]
    claims = [n for n in others if n.startswith(f"{GENERATIONS}/")]
    contents = [n for n in others if CONTENT.fullmatch(n)]
    scratch = [n for n in others if n.startswith(f"{SCRATCH}/")]
    found = [(LEFT, scratch)]
    if not manifests:
        found += [(UNNAMED, contents), (EARLIER, claims)]
    elif not limits.is_read:
        found += [(EARLIER, [*manifests, *contents, *claims])]
    return [g for why, names in found for g in _named(step, why, names)]


def _given_up(step: StoredStep, limits: Limits) -> list[Garbage]:
    """All of an unfinished step that did not change lately; its lock shows that a flow began it."""
    if step.lock is None or not limits.passed(step.modified):
        return []
    if _earlier_manifests(step):  # what a `--force` was to replace counts until it is finished
        return _named(step, LEFT, [n for n in step.names if n.startswith(f"{SCRATCH}/")])
    return _named(step, GIVEN_UP, sorted(step.names, key=_turn))


def _turn(name: str) -> tuple[int, str]:
    """Manifests first, claims of generations last."""
    return (0 if is_numbered(name) else 2 if name.startswith(f"{GENERATIONS}/") else 1), name


def _named(step: StoredStep, reason: str, names: Iterable[str]) -> list[Garbage]:
    return Garbage.of(step.place.key, reason, [step.names[name] for name in names])


def _earlier_manifests(step: StoredStep) -> list[str]:
    return sorted(name for name in step.names if is_earlier(name, step.generation))


def _needed(step: StoredStep, limits: Limits) -> list[str]:
    """Manifests of earlier generations that finished steps were made from."""
    return sorted(name for name, m in step.earlier.items() if m.content in limits.inputs)


def _remove_from_step(step: StoredStep, limits: Limits) -> list[Garbage]:
    """Remove what may go from a step, under its lock; nothing if another run used it meanwhile."""
    store, key = step.place.store, step.place.key
    with hold(store, [key]) as held:
        lock = held[key]
        if lock.fence != (step.lock.newest.number + 1 if step.lock else 1):
            raise LockedError(store.where(key), "was in use meanwhile")
        gone = step_garbage(relisted(step), limits)
        for entry in gone:
            _delete(store, entry.keys, lock)
            _remove_hidden(step.place, entry.reason)
    left = newest_entry(store, key)
    if left is not None and not left.is_held:
        is_whole = any(entry.reason == GIVEN_UP for entry in gone)
        _trim(store, key, left.number, keep_newest=not is_whole)
    return gone


def _delete(store: Store, keys: Sequence[str], lock: Lock) -> None:
    for start in range(0, len(keys), AT_ONCE):
        lock.check()
        store.delete(keys[start : start + AT_ONCE])


def _remove_hidden(place: StepPlace, reason: str) -> None:
    """Remove files that are no keys, and folders without files."""
    if reason == GIVEN_UP:
        shutil.rmtree(place.path, ignore_errors=True)
    elif reason == LEFT:
        place.clear_scratch()


# -- locks


def _old_entries(log: LockLog, found: Inventory, limits: Limits) -> list[Garbage]:
    """Entries of a lock that was not used lately; the newest stays as long as its step does."""
    if log.newest.is_held or not limits.passed(log.modified):
        return []
    entries = log.entries[:-1] if _has_keys(found, log.name) else log.entries
    return Garbage.of(f"{LOCKS}/{log.name}", OLD_LOCK, entries)


def _has_keys(found: Inventory, name: str) -> bool:
    return name in found.steps and bool(found.steps[name].names)


def _remove_entries(store: Store, entry: Garbage, found: Inventory) -> list[Garbage]:
    """Remove old entries of a lock, unless it was used meanwhile."""
    name = entry.place.removeprefix(f"{LOCKS}/")
    seen, now = found.locks[name].newest.number, newest_entry(store, name)
    if now is None or now.number != seen:
        return []
    _trim(store, name, seen, keep_newest=_has_keys(found, name))
    return [entry]


def _trim(store: Store, name: str, newest: int, *, keep_newest: bool) -> None:
    """Remove the entries of a lock up to its newest one, which goes last.

    A process that takes the lock meanwhile writes a higher number. Only if a third one starts
    between those two moments do both hold the lock until the first renewal; the protocol of the
    storage, not the lock, then keeps their results whole.
    """
    keys = [listed.key for listed in store.listing(f"{LOCKS}/{name}")]
    last = f"{LOCKS}/{name}/{newest:09d}.json"
    store.delete([key for key in keys if key < last])
    if not keep_newest:
        store.delete([last])


# -- what killed processes left


def _leftovers(found: Inventory, now: float) -> list[Garbage]:
    """Keys of probes and files of unfinished writes that are a day old."""
    probes = [one for one in found.others if PROBE_KEY.fullmatch(one.key)]
    writing = found.storage.store.listing(WRITING)
    return [
        garbage
        for why, listed in ((PROBE, probes), (TORN, writing))
        for garbage in Garbage.of(
            listed[0].key.partition("/")[0] if listed else "",
            why,
            [one for one in listed if now - one.modified > ABANDONED],
        )
    ]


def _announcements(found: Inventory, now: float) -> list[Garbage]:
    """Announcements, a day old, of steps for other recipes that are not in the storage any more."""
    store = found.storage.store
    old = [
        one
        for one in found.others
        if ANNOUNCED.fullmatch(one.key) and now - one.modified > ABANDONED
    ]
    gone = [
        one
        for one in old
        if (store.find(one.key) or b"").decode(errors="replace") not in found.steps
    ]
    return Garbage.of("shared", NO_STEP, gone)
