"""The one sharded executor: a pure function over work units on Ray actors.

A unit's result must depend on its payload and the configuration alone. Workers get leases of many
units and store the results of a lease as one object, so a second start computes only what is
missing; a dead worker or node costs its unfinished leases only. `dispatch` decides who computes
what, `actors` are the workers, `parts` finds results.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from components.core.units import ProgressBar, SoFar, Unit, UnitSource
from pipelines.recipe.schema.place import ClusterSection
from pipelines.runtime import progress
from pipelines.runtime.actors import ActorCrew, ActorPool, Job, MakeWork
from pipelines.runtime.blame import ShardFailedError
from pipelines.runtime.crew import State
from pipelines.runtime.dispatch import Dispatch
from pipelines.runtime.gauges import shown_at
from pipelines.runtime.leases import Outcome
from pipelines.runtime.live import LiveMetrics, live_metrics, metrics_of
from pipelines.runtime.parts import PartStore, Plan

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
    label: str = "",
    source: UnitSource | None = None,
    out: "StageDir | None" = None,
    phase: str = "",
) -> None:
    """Compute every unit without a stored result. `make` is a module-level function of `config`.

    With a `source`, also the units that it adds as results come in. Progress is written to the
    scratch folder of `out`, live metrics go to its MLflow run; `phase` names a part of the stage.
    Workers are kept between calls of one `label`, by default the step of `out`.
    """
    label = label or (out.step if out else "units")
    source = source or _Counted(units)
    plan = parts.plan([unit.name for unit in units])
    todo = unfinished(units, plan, source) or further(source, plan, room=1, ahead=1)
    if not todo:
        return
    place = shown_at(out) if out else {"file": None, "watch": None}
    shown = progress.bar(label, total=source.total, unit=source.counts, phase=phase, **place)
    with shown as bar, live_metrics(_sender(out)) as live:
        source.show(bar)
        desk = _Desk(label, plan, source, bar, live)
        job = Job(f"{label}-{parts.run_id}", make, config, plan.writer, source.brief)
        crew = ActorCrew(_POOL, cluster, job, plan)
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
    """A fixed list of units; counts the images of those that are finished."""

    counts = "images"
    brief = None

    def __init__(self, units: Sequence[Unit]) -> None:
        self.total, self.done = sum(unit.num_items for unit in units), 0.0

    def keep(self, unit: Unit, brief: Any) -> None:
        self.done += unit.num_items

    def next(self, room: int, *, ahead: int) -> Sequence[Unit]:
        return ()

    def show(self, bar: ProgressBar) -> None:
        bar.at(self.done)

    def so_far(self) -> SoFar:
        return SoFar()


def unfinished(units: Sequence[Unit], plan: Plan, source: UnitSource) -> list[Unit]:
    """The units of a plan without a result; the source gets the briefs of the others."""
    finished = plan.finished()
    if source.brief is None:
        for ordinal in finished.nonzero()[0].tolist():
            source.keep(units[ordinal], None)
    else:
        for ordinal, brief in plan.briefs(source.brief):
            source.keep(units[ordinal], brief)
    return [units[ordinal] for ordinal in (~finished).nonzero()[0].tolist()]


def further(source: UnitSource, plan: Plan, *, room: int, ahead: int) -> list[Unit]:
    """Up to `room` further units of the source that no earlier start has finished."""
    found: list[Unit] = []
    while len(found) < room:
        asked = source.next(room - len(found), ahead=max(0, ahead - len(found)))
        if not asked:
            break
        for unit in asked:
            if plan.has(unit.name):
                source.keep(unit, source.brief and plan.brief(unit.name, source.brief))
            else:
                found.append(unit)
    return found


class _Desk:
    """Units from a source, briefs of results back to it, messages and figures to the user."""

    def __init__(
        self,
        label: str,
        plan: Plan,
        source: UnitSource,
        bar: progress.Bar,
        live: LiveMetrics | None,
    ) -> None:
        self.label, self.plan, self.source, self.bar, self.live = label, plan, source, bar, live
        self.asked = time.monotonic()
        self.before: tuple[float, int] | None = None  # when, and images by then
        self.silent = False  # the source cannot tell intermediate results

    def more(self, room: int, *, ahead: int) -> Sequence[Unit]:
        return further(self.source, self.plan, room=room, ahead=ahead)

    def keep(self, units: Sequence[Unit], outcome: Outcome) -> None:
        self.plan.add(outcome.group, outcome.num_bytes, [unit.name for unit in units])
        briefs = outcome.briefs if outcome.briefs is not None else [None] * len(units)
        for unit, brief in zip(units, briefs, strict=True):
            self.source.keep(unit, brief)
        returned = sum(unit.num_items for unit in units)
        self.bar.status.under_way = max(0.0, self.bar.status.under_way - returned)
        self.source.show(self.bar)

    def tell(self, text: str) -> None:
        progress.say(f"{self.label}: {text}")

    def look(self, state: State) -> None:
        status = self.bar.status
        status.workers, status.workers_wanted = state.ready, state.wanted
        status.failures, status.waiting_seconds = state.failures, state.waiting_seconds
        status.under_way, status.evaluations = state.under_way, state.evaluations
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
