"""The one sharded executor: a pure function over work units on Ray actors.

A unit's result must depend on its payload and the configuration alone. Finished units are durable
parts, so a second start computes only what is missing; a dead worker or node costs its unfinished
units only. `dispatch` decides who computes what, `actors` are the workers.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from components.core.units import ProgressBar, SoFar, Unit, UnitSource
from pipelines.recipe.schema.place import ClusterSection
from pipelines.runtime import progress
from pipelines.runtime.actors import ActorCrew, ActorPool, Job, MakeWork
from pipelines.runtime.crew import State
from pipelines.runtime.dispatch import Dispatch, ShardFailedError
from pipelines.runtime.gauges import shown_at
from pipelines.runtime.live import LiveMetrics, live_metrics, metrics_of
from pipelines.runtime.parts import PartStore

if TYPE_CHECKING:
    from pipelines.runtime.artifacts import StageDir

__all__ = ["ShardFailedError", "Unit", "release_workers", "run_units"]

LOG = logging.getLogger("casemate.shards")
SO_FAR_SECONDS = 10.0  # between two questions for intermediate results

_POOL = ActorPool()


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
    out: "StageDir | None" = None,
    phase: str = "",
) -> None:
    """Compute every unit that has no part yet. `make` is a module-level function of `config`.

    With a `source`, also the units that it adds as results come in. Progress is written to the
    scratch folder of `out`, live metrics go to its MLflow run; `phase` names a part of the stage.
    """
    source = source or _Counted(units)
    todo = [unit for unit in units if not _kept(unit, parts, source)]
    todo = todo or _missing(source, parts, room=1)
    if not todo:
        return
    place = shown_at(out) if out else {"file": None, "watch": None}
    shown = progress.bar(label, total=source.total, unit=source.counts, phase=phase, **place)
    with shown as bar, live_metrics(_sender(out)) as live:
        source.show(bar)
        desk = _Desk(label, parts, source, bar, live)
        crew = ActorCrew(_POOL, cluster, Job(f"{label}-{parts.run_id}", make, config))
        try:
            Dispatch(crew, desk, todo, max_wait=cluster.max_wait).run()
        except BaseException:
            release_workers()  # units in flight must not outlive the call
            raise


def _sender(out: "StageDir | None") -> Callable[[Mapping[str, float], int], None] | None:
    if out is None:
        return None
    run = out.run
    return lambda values, step: run.metrics(values, step=step)


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

    def so_far(self) -> SoFar:
        return SoFar()


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


class _Desk:
    """Units from a source, results to a part store, messages and figures to the user."""

    def __init__(
        self,
        label: str,
        parts: PartStore,
        source: UnitSource,
        bar: progress.Bar,
        live: LiveMetrics | None,
    ) -> None:
        self.label, self.parts, self.source, self.bar, self.live = label, parts, source, bar, live
        self.asked = time.monotonic()
        self.before: tuple[float, int] | None = None  # when, and images by then
        self.silent = False  # the source cannot tell intermediate results

    def more(self, room: int) -> Sequence[Unit]:
        return _missing(self.source, self.parts, room=room)

    def keep(self, unit: Unit, table: pa.Table) -> None:
        self.parts.save(unit.name, table)
        self.source.keep(unit, table)
        self.source.show(self.bar)

    def tell(self, text: str) -> None:
        progress.say(f"{self.label}: {text}")

    def look(self, state: State) -> None:
        status = self.bar.status
        status.workers, status.workers_wanted = state.ready, state.wanted
        status.failures, status.waiting_seconds = state.failures, state.waiting_seconds
        if time.monotonic() - self.asked >= SO_FAR_SECONDS and not self.silent:
            self.asked = time.monotonic()
            self._ask()

    def _ask(self) -> None:
        """Intermediate results; they must never fail a stage."""
        status, is_due = self.bar.status, self.live is not None and self.live.is_due()
        try:
            found = self.source.so_far()
            values = metrics_of(
                found, done=status.done, failures=status.failures, phase=status.phase
            )
        except Exception:
            self.silent = True
            LOG.warning("%s: no intermediate results", self.label, exc_info=True)
            return
        status.draws = found.draws
        now, images = time.monotonic(), found.draws or found.images
        if self.before and now > self.before[0]:
            status.images_per_second = (images - self.before[1]) / (now - self.before[0])
        self.before = now, images
        if self.live and is_due:
            self.live.offer(values, int(status.done))
