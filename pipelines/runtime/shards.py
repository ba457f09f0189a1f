"""The one sharded executor: a pure function over work units on Ray actors.

A unit's result must depend on its payload and the configuration alone. Finished units are durable
parts, so a second start computes only what is missing; a dead worker or node costs its unfinished
units only. Requeueing is ours: Ray's own actor retries do not survive the loss of a node.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayTaskError

from components.core.errors import CasemateError, last_line
from components.core.units import ProgressBar, Unit, UnitSource, WorkFn
from pipelines.recipe.schema.place import ClusterSection
from pipelines.runtime import progress
from pipelines.runtime.cluster import total_cpus
from pipelines.runtime.parts import PartStore

IN_FLIGHT = 2  # units per actor: hides latency, keeps memory bounded
MAX_TRIES = 3
GIVE_UP_SECONDS = 300.0  # with no worker alive

MakeWork = Callable[[Any], WorkFn]


class ShardFailedError(RuntimeError):
    """Units that failed three times; everything else is done and kept."""


@dataclass(frozen=True)
class _Job:
    """What all units of one call share; actors load it once, a restarted actor loads it again."""

    name: str
    make: MakeWork
    config: Any


@ray.remote(max_restarts=-1, max_task_retries=0)
class ShardWorker:
    """Loads the work of a job once (`make(config)`), then computes one unit after the other."""

    def __init__(self, num_threads: int) -> None:
        import torch

        torch.set_num_threads(num_threads)  # Ray's OMP_NUM_THREADS does not reach reused processes
        self.job = ""
        self.work: WorkFn | None = None

    def ready(self) -> bool:
        return True

    def run(self, job: _Job, payload: Any) -> pa.Table:
        if job.name != self.job or self.work is None:
            self.job, self.work = job.name, job.make(job.config)
        return self.work(payload)


class _Pool:
    """Actors kept from one call to the next: starting one costs seconds of imports."""

    def __init__(self) -> None:
        self.shape: tuple[Any, ...] = ()
        self.workers: list[ActorHandle] = []

    def take(self, count: int, cluster: ClusterSection) -> list[ActorHandle]:
        shape = (
            ray.get_runtime_context().get_job_id(),
            cluster.cpus_per_actor,
            cluster.gpus_per_actor,
        )
        if shape != self.shape:
            self.workers, self.shape = [], shape
        actor = ShardWorker.options(  # type: ignore[attr-defined]
            num_cpus=cluster.cpus_per_actor, num_gpus=cluster.gpus_per_actor
        )
        while len(self.workers) < count:
            self.workers.append(actor.remote(cluster.cpus_per_actor))
        return self.workers[:count]

    def release(self) -> None:
        for worker in self.workers:
            ray.kill(worker)
        self.workers = []


_POOL = _Pool()


def release_workers() -> None:
    """Give the actors' CPUs back, before work that needs them for itself."""
    _POOL.release()


def run_units(
    units: Sequence[Unit],
    *,
    make: MakeWork,
    config: Any,
    parts: PartStore,
    cluster: ClusterSection,
    label: str,
    source: UnitSource | None = None,
) -> None:
    """Compute every unit that has no part yet. `make` is a module-level function of `config`.

    With a `source`, also the units that it adds as results come in.
    """
    source = source or _Counted(units)
    todo = [unit for unit in units if not _kept(unit, parts, source)]
    todo = todo or _missing(source, parts, room=1)
    if not todo:
        return
    fit = num_actors(cluster)
    todo += _missing(source, parts, room=fit - len(todo))
    with progress.bar(label, total=source.total, unit=source.counts) as bar:
        source.show(bar)
        workers = _POOL.take(min(fit, len(todo)), cluster)  # never more than units
        job = _Job(f"{label}-{parts.run_id}", make, config)
        try:
            _Driver(workers, job, todo, parts, source, bar).drain()
        except BaseException:
            release_workers()  # units in flight must not outlive the call
            raise


class _Counted:
    """A fixed list of units; counts those that are finished."""

    counts = "units"

    def __init__(self, units: Sequence[Unit]) -> None:
        self.total, self.done = len(units), 0

    def keep(self, unit: Unit, table: pa.Table) -> None:
        self.done += 1

    def next(self, room: int) -> Sequence[Unit]:
        return ()

    def show(self, bar: ProgressBar) -> None:
        bar.at(self.done)


def _kept(unit: Unit, parts: PartStore, source: UnitSource) -> bool:
    """Whether an earlier start has finished it; if so, the source gets its table."""
    table = parts.find(unit.name)
    if table is not None:
        source.keep(unit, table)
    return table is not None


def _missing(source: UnitSource, parts: PartStore, *, room: int) -> list[Unit]:
    """Up to `room` further units of the source that no earlier start has finished."""
    found: list[Unit] = []
    while len(found) < room and (asked := source.next(room - len(found))):
        found += [unit for unit in asked if not _kept(unit, parts, source)]
    return found


def num_actors(cluster: ClusterSection) -> int:
    """The number of actors in the recipe, else as many as fit."""
    fit = max(1, total_cpus() // cluster.cpus_per_actor)
    if cluster.gpus_per_actor:
        gpus = ray.cluster_resources().get("GPU", 0)
        fit = min(fit, int(gpus / cluster.gpus_per_actor))
        if fit == 0:
            raise CasemateError(
                "cluster.gpus_per_actor",
                cluster.gpus_per_actor,
                f"cannot be met: {gpus:g} GPUs here",
            )
    return min(cluster.num_actors or fit, fit)


class _Driver:
    """The loop: feed free workers, keep finished parts, requeue what a dead worker held."""

    def __init__(
        self,
        workers: list[ActorHandle],
        job: _Job,
        todo: Sequence[Unit],
        parts: PartStore,
        source: UnitSource,
        bar: progress.Bar,
    ) -> None:
        self.job = ray.put(job)
        self.todo = deque(todo)
        self.parts = parts
        self.source = source
        self.bar = bar
        self.idle: deque[ActorHandle] = deque()  # one entry per free slot of a worker
        self.busy: dict[Any, tuple[ActorHandle, Unit]] = {}
        self.probes: dict[Any, ActorHandle] = {}
        self.tries: Counter[str] = Counter()
        self.queued_behind: set[str] = set()  # another unit when their worker died
        self.failed: dict[str, tuple[Unit, BaseException]] = {}
        self.last_alive = time.monotonic()
        self.idle.extend(worker for _ in range(IN_FLIGHT) for worker in workers)
        self._feed()

    def drain(self) -> None:
        while self.busy or self.todo:
            if not self.busy and not self.probes:
                raise ShardFailedError("every worker is gone for good; start again to continue")
            done, _ = ray.wait([*self.busy, *self.probes], num_returns=1, timeout=10)
            for ref in done:
                self._collect_probe(ref) if ref in self.probes else self._collect(ref)
            if time.monotonic() - self.last_alive > GIVE_UP_SECONDS and not self.busy:
                raise ShardFailedError("all workers are lost; start again to continue")
        if self.failed:
            self._raise_failures()

    def _feed(self) -> None:
        """Give units to free workers; when the queue is empty, take more from the source."""
        if (room := len(self.idle) - len(self.todo)) > 0:
            self.todo.extend(_missing(self.source, self.parts, room=room))
        while self.todo and self.idle:
            worker, unit = self.idle.popleft(), self.todo.popleft()
            self.busy[worker.run.remote(self.job, unit.payload)] = worker, unit

    def _collect(self, ref: Any) -> None:
        worker, unit = self.busy[ref]
        try:
            table = ray.get(ref)
        except (ActorUnavailableError, ActorDiedError) as error:
            self._excuse_queued(worker)
            del self.busy[ref]
            self._requeue(unit, error)
            if worker not in self.probes.values():
                self.idle = deque(other for other in self.idle if other != worker)
                self.probes[worker.ready.remote()] = worker
            self._feed()
            return
        except (RayTaskError, RayActorError) as error:
            cause = getattr(error, "cause", None) or error
            if isinstance(cause, CasemateError):
                raise cause from None  # a user's mistake: a second try would fail, too
            self._requeue(unit, cause)
        else:
            self.parts.save(unit.name, table)
            self.source.keep(unit, table)
            self.source.show(self.bar)
        del self.busy[ref]
        self.last_alive = time.monotonic()
        self.idle.append(worker)
        self._feed()

    def _excuse_queued(self, worker: ActorHandle) -> None:
        """A dead worker was busy with its oldest unit; those queued behind it lose no try."""
        held = [unit.name for other, unit in self.busy.values() if other == worker]
        if held and held[0] not in self.queued_behind:
            self.queued_behind.update(held[1:])

    def _collect_probe(self, ref: Any) -> None:
        """Use a lost actor again if it is back; if it is dead, the other actors go on."""
        worker = self.probes.pop(ref)
        try:
            ray.get(ref)
        except ActorUnavailableError:
            time.sleep(0.5)
            self.probes[worker.ready.remote()] = worker
        except ActorDiedError as error:
            if not self.busy and not self.probes:
                raise ShardFailedError(f"workers cannot start: {last_line(error)}") from error
        else:
            self.last_alive = time.monotonic()
            self.idle.extend([worker] * IN_FLIGHT)
            self._feed()

    def _requeue(self, unit: Unit, error: BaseException) -> None:
        if unit.name in self.queued_behind:
            self.queued_behind.remove(unit.name)
        else:
            self.tries[unit.name] += 1
        if self.tries[unit.name] >= MAX_TRIES:
            self.failed[unit.name] = unit, error
        else:
            self.todo.append(unit)

    def _raise_failures(self) -> None:
        unit, error = next(iter(self.failed.values()))
        raise ShardFailedError(
            f"{len(self.failed)} unit(s) failed {MAX_TRIES} times, all others are kept; "
            f"first {unit.name} ({unit.about}): {type(error).__name__}: {last_line(error)}"
        ) from error
