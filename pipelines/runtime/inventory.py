"""What a storage holds, from one listing of it and the manifests: steps, sizes, who uses them.

Nothing is written, so a storage that may only be read can be listed, too.
"""

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from components.core.errors import CasemateError
from pipelines.runtime.locks import LOCKS, Entry, parse_entry
from pipelines.runtime.manifests import MANIFEST, Manifest, parse_manifest
from pipelines.runtime.storage import (
    FILES,
    GENERATIONS,
    SCRATCH,
    StepPlace,
    Storage,
    belongs_to_storage,
    is_numbered,
    refuse_odd_uri,
)
from pipelines.runtime.store import Listed, Store

STEP_KEY = re.compile(r"([^/]+/[^/]+-[0-9a-f]{12})/(.+)")  # the step, and a name in it
LOCK_KEY = re.compile(rf"{LOCKS}/(.+)/\d{{9}}\.json")
FINISHED, UNFINISHED, RUNNING = "finished", "unfinished", "running"
DAMAGED = "damaged"  # its manifest
READERS = 16  # threads that read small keys of a bucket

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LockLog:
    """The entries of a lock, oldest first; the newest has its age by the clock of this machine."""

    name: str
    entries: tuple[Listed, ...]
    newest: Entry

    @property
    def modified(self) -> float:
        return self.entries[-1].modified


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a step: of its current files, for a resumed step, and of earlier generations.

    Files that were stored and never published count as earlier ones.
    """

    files: int = 0
    unfinished: int = 0
    earlier: int = 0

    @property
    def total(self) -> int:
        return self.files + self.unfinished + self.earlier


@dataclass(frozen=True)
class StoredStep:
    """A step as a storage holds it; `names` are its keys without the step's own."""

    place: StepPlace
    names: Mapping[str, Listed]
    lock: LockLog | None = None
    manifest: Manifest | None = None
    damage: CasemateError | None = None
    """Why the manifest cannot be read; the step is finished all the same."""
    earlier: Mapping[str, Manifest] = field(default_factory=dict)
    """Manifests of earlier generations by their names; those that cannot be read are left out."""

    @property
    def recipe(self) -> str:
        return self.place.recipe

    @property
    def step(self) -> str:
        return self.place.name.rpartition("-")[0]

    @property
    def fingerprint(self) -> str:
        return self.place.name.rpartition("-")[2]

    @property
    def generation(self) -> int:
        return _generation(self.names)

    @property
    def in_use(self) -> bool:
        return self.lock is not None and self.lock.newest.is_held

    @property
    def finished(self) -> bool:
        return self.manifest is not None or self.damage is not None

    @property
    def state(self) -> str:
        if self.damage is not None:
            return DAMAGED
        if self.finished:
            return FINISHED
        return RUNNING if self.in_use else UNFINISHED

    @property
    def modified(self) -> float:
        """When the step last changed, by the clock of the storage; a lock is a sign of work."""
        signs = [] if self.finished or self.lock is None else [self.lock.modified]
        return max([*signs, *(listed.modified for listed in self.names.values())])

    @property
    def published(self) -> float:
        """When the manifest of a finished step was written."""
        name = _manifest_name(self.place, self.names)
        return self.names[name].modified if name else 0.0

    @cached_property
    def current(self) -> frozenset[str]:
        """Names of the keys that a finished step consists of."""
        if self.damage is not None:  # then all of them may be
            return frozenset(self.names)
        name = _manifest_name(self.place, self.names)
        if self.manifest is None or name is None:
            return frozenset()
        claim = f"{GENERATIONS}/{self.generation:06d}"
        found = {name, claim, *self.files_of(self.manifest)}
        return frozenset(found & self.names.keys())

    def files_of(self, manifest: Manifest) -> set[str]:
        """Names of the keys with the files of a manifest."""
        refs = self.place.refs(manifest).values()
        return {ref.key.removeprefix(f"{self.place.key}/") for ref in refs}

    @cached_property
    def sizes(self) -> Sizes:
        """Bytes without what is counted already: a folder shows files under a second name."""
        found: dict[str, int] = defaultdict(int)
        for name in self.names.keys() - self._shown:
            found[self._kind(name)] += self.names[name].bytes
        return Sizes(**found)

    def _kind(self, name: str) -> str:
        if name in self.current:
            return "files"
        if name.startswith(f"{SCRATCH}/"):
            return "unfinished"
        is_stored = belongs_to_storage(name) and (self.finished or self.generation > 0)
        return "earlier" if is_stored else "unfinished"

    @property
    def _shown(self) -> set[str]:
        """Names for people: second names of stored files, and a copy of the manifest."""
        plain = {n for n in self.names if not belongs_to_storage(n) or n == MANIFEST}
        if self.finished:
            return plain - self.current
        stored = {
            (name.split("/", 2)[2], listed.bytes)
            for name, listed in self.names.items()
            if name.startswith(f"{FILES}/") and name.count("/") > 1
        }
        return {name for name in plain if (name, self.names[name].bytes) in stored}


@dataclass(frozen=True, slots=True)
class Flow:
    """The steps of one recipe in a storage."""

    name: str
    steps: tuple[StoredStep, ...]

    @property
    def num_finished(self) -> int:
        return sum(step.finished for step in self.steps)

    @property
    def state(self) -> str:
        if any(step.in_use for step in self.steps):
            return RUNNING
        return FINISHED if self.num_finished == len(self.steps) else UNFINISHED

    @property
    def bytes(self) -> int:
        return sum(step.sizes.total for step in self.steps)

    @property
    def modified(self) -> float:
        return max(step.modified for step in self.steps)


@dataclass(frozen=True)
class Inventory:
    """All steps of a storage by their keys, all locks by their names, and every other key."""

    storage: Storage
    steps: Mapping[str, StoredStep]
    locks: Mapping[str, LockLog]
    others: tuple[Listed, ...]

    def finished(self) -> list[tuple[StoredStep, Manifest]]:
        """Finished steps, oldest first; a manifest that cannot be read is an error."""
        found = []
        for step in self.steps.values():
            if step.damage is not None:
                raise step.damage
            if step.manifest is not None:
                found.append((step, step.manifest))
        return sorted(found, key=lambda pair: (pair[0].published, pair[0].place.key))

    def flows(self) -> list[Flow]:
        """The recipes of the storage, by the time of their last change."""
        found: dict[str, list[StoredStep]] = defaultdict(list)
        for step in sorted(self.steps.values(), key=lambda step: (step.modified, step.place.key)):
            found[step.recipe].append(step)
        flows = [Flow(name, tuple(steps)) for name, steps in found.items()]
        return sorted(flows, key=lambda flow: (flow.modified, flow.name))


def existing_storage(place: str | Path, *, key: str = "storage") -> Storage:
    """A storage that is read; a folder must exist."""
    refuse_odd_uri(place, key=key)
    storage = Storage.at(place)
    if storage.is_local and not Path(storage.root).is_dir():
        raise CasemateError(key, place, "is not a folder; run a recipe first")
    return storage


def inventory(storage: Storage) -> Inventory:
    """What a storage holds.

    A step that a flow has locked and not begun counts as unfinished.
    """
    steps: dict[str, dict[str, Listed]] = defaultdict(dict)
    locks: dict[str, list[Listed]] = defaultdict(list)
    others: list[Listed] = []
    for listed in storage.store.listing(""):
        if found := LOCK_KEY.fullmatch(listed.key):
            locks[found[1]].append(listed)
        elif found := STEP_KEY.fullmatch(listed.key):
            steps[found[1]][found[2]] = listed
        else:
            others.append(listed)
    logs = _lock_logs(storage.store, locks)
    for name in logs:
        if STEP_KEY.fullmatch(f"{name}/lock"):
            steps.setdefault(name, {})
    for key in [key for key, names in steps.items() if not _is_step(names, key in logs)]:
        others += steps.pop(key).values()
    places = [StepPlace(storage, key) for key in steps]
    made = _each(lambda p: stored_step(p, steps[p.key], logs.get(p.key)), places, storage.store)
    return Inventory(storage, {step.place.key: step for step in made}, logs, tuple(others))


def relisted(step: StoredStep) -> StoredStep:
    """The step as it is now; its lock is not read again."""
    listing = step.place.store.listing(step.place.key)
    names = {listed.key.removeprefix(f"{step.place.key}/"): listed for listed in listing}
    return stored_step(step.place, names, step.lock)


def stored_step(place: StepPlace, names: Mapping[str, Listed], lock: LockLog | None) -> StoredStep:
    """A step with its manifests."""
    name = _manifest_name(place, names)
    number = _generation(names)
    old = (_read(place, other) for other in names if is_earlier(other, number))
    earlier = {name: manifest for name, manifest, _ in old if manifest is not None}
    if name is None:
        return StoredStep(place, names, lock, earlier=earlier)
    _, manifest, damage = _read(place, name)
    if name == MANIFEST and manifest is not None and manifest.generation is not None:
        manifest = None  # without its number, only a manifest of version 0.1 counts
    return StoredStep(place, names, lock, manifest, damage, earlier)


def _read(place: StepPlace, name: str) -> tuple[str, Manifest | None, CasemateError | None]:
    """A manifest, or why it cannot be read; neither if it was removed meanwhile."""
    content = place.store.find(f"{place.key}/{name}")
    if content is None:
        return name, None, None
    try:
        return name, parse_manifest(content, source=f"{place}/{name}"), None
    except CasemateError as error:
        return name, None, error


def _is_step(names: Iterable[str], has_lock: bool) -> bool:
    """Whether a folder with the name of a step is one."""
    return has_lock or any(belongs_to_storage(name) for name in names)


def _generation(names: Iterable[str]) -> int:
    claims = (n.removeprefix(f"{GENERATIONS}/") for n in names if n.startswith(f"{GENERATIONS}/"))
    return max((int(claim) for claim in claims if claim.isdigit()), default=0)


def _manifest_name(place: StepPlace, names: Mapping[str, Listed]) -> str | None:
    """The key of the manifest of the current generation, without that of the step."""
    number = _generation(names)
    name = place.manifest_key(number).rpartition("/")[2]
    if name in names:
        return name
    return MANIFEST if place.storage.is_local and not number and MANIFEST in names else None


def _lock_logs(store: Store, locks: Mapping[str, Sequence[Listed]]) -> dict[str, LockLog]:
    """Locks by name; one that was removed since the listing is left out."""

    def read(name: str) -> LockLog | None:
        newest = locks[name][-1]
        content = store.find(newest.key)
        if content is None:
            return None
        number = int(Path(newest.key).stem)
        age = time.time() - newest.modified
        entry = parse_entry(store.where(newest.key), number, content, age)
        return LockLog(name, tuple(locks[name]), entry)

    return {log.name: log for log in _each(read, list(locks), store) if log is not None}


def _each(function: Callable[[S], T], values: Sequence[S], store: Store) -> list[T]:
    """The results for all values; those that wait for a bucket wait together."""
    if store.is_local:
        return [function(value) for value in values]
    with ThreadPoolExecutor(READERS) as pool:
        return list(pool.map(function, values))


def is_earlier(name: str, generation: int) -> bool:
    """Whether it is the manifest of an earlier generation."""
    return is_numbered(name) and int(name.partition(".")[0]) < generation
