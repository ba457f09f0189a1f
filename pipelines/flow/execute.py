"""Executes steps of a flow: tracking and Ray are connected once, then stage after stage runs.

Ray starts while a thread loads torch, timm and MLflow.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from components.core.problems import named
from components.core.user_code import digests
from pipelines.flow import told
from pipelines.flow.plan import PlannedStep
from pipelines.flow.sharing import announce
from pipelines.recipe.gpus import unused_gpus
from pipelines.recipe.schema.recipe import Recipe
from pipelines.runtime import progress
from pipelines.runtime.artifacts import StageDir
from pipelines.runtime.cluster import (
    check_joinable,
    end_idle_actors,
    ray_cluster,
    total_cpus,
)
from pipelines.runtime.devices import total_gpus
from pipelines.runtime.forwarding import in_job
from pipelines.runtime.locks import Lock
from pipelines.runtime.run_origin import origin_tags
from pipelines.runtime.shards import release_workers
from pipelines.runtime.step_locks import in_turn
from pipelines.runtime.storage import SCRATCH, Storage
from pipelines.runtime.tracking_uri import (
    FOLDER_TAG,
    STORAGE_TAG,
    begin_flow,
    end_flow,
    flow_outbox,
    is_server,
    tracking_uri,
)
from pipelines.stages.registry import DATASET, STAGES

if TYPE_CHECKING:
    from pipelines.runtime.step_run import StepRun
    from pipelines.runtime.tracking import Tracker

TRACKING = "tracking"  # lock: one process at a time makes the store and a flow's run


def execute(
    recipe: Recipe,
    root: Storage,
    todo: Sequence[PlannedStep],
    *,
    inputs: Mapping[str, PlannedStep],
    flow: str,
    address: str | None,
    again: set[str],
    held: Mapping[str, Lock],
) -> None:
    """Run the steps `todo`; `inputs` are all planned steps, `again` those to run again.

    `held` are the locks of the steps by their keys.
    """
    if place := address or recipe.cluster.address:
        check_joinable(place)  # before a tracking store is made for a flow that cannot start
    tracking_uri(recipe.tracking, root)  # refused before Ray starts, if there is none
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(_check_and_track, recipe, root, flow)
        own_code = digests(recipe.resolved())
        with ExitStack() as stack:
            with progress.busy("starting Ray, loading torch and MLflow"):
                stack.enter_context(
                    ray_cluster(recipe.cluster, address=address, user_code=own_code)
                )
                stack.enter_context(_stop_signals())
                tracker = stack.enter_context(closing(loading.result()))
            for step in todo:
                if step.name in again:
                    tracker.supersede(step.name, step.fingerprint)
                    step.place.renew("--force, or made from inputs that were replaced")
            outbox = flow_outbox(root.path / recipe.name, flow, todo[0].name)
            parent = _flow_run(tracker, recipe, root, flow, outbox)
            if notice := unused_gpus(recipe, total_gpus(), stages={p.step.stage for p in todo}):
                progress.say(str(notice))
            _run_all(_Runner(recipe, tracker, parent, inputs, held), todo)
            end_flow(root.path / recipe.name, flow)


def _run_all(runner: "_Runner", todo: Sequence[PlannedStep]) -> None:
    """Stage after stage; the flow's MLflow run ends as the flow does."""
    try:
        for _, batch in groupby(todo, key=lambda p: (p.step.stage, p.step.waits)):
            runner.run_stage(list(batch))
            told.tell(runner.parent, runner.recipe, list(runner.steps.values()))
    except BaseException as error:
        runner.parent.finish(_status(error))
        if isinstance(error, KeyboardInterrupt | SystemExit):
            progress.say("casemate: stopped; the same command continues where it stopped")
        if runner.trainings_left:
            _leave(error)
        raise
    finally:
        give_cpus_back()
    if in_job() and not all(step.finished for step in runner.steps.values()):
        runner.parent.outbox.drain()  # the job of another stage ends the flow's run
    else:
        runner.parent.complete()


def give_cpus_back() -> None:
    """A Ray that outlives this flow gets back what its workers held."""
    release_workers()


def complete_flow(
    recipe: Recipe,
    root: Storage,
    flow: str,
    unsent: Sequence[Path],
    *,
    steps: Sequence[PlannedStep],
) -> None:
    """End the MLflow run of a flow whose steps are finished.

    The server was away at the end, or the process was killed there.
    """
    from pipelines.runtime.tracking import Tracker

    with closing(Tracker(recipe.tracking, storage=root, recipe=recipe.name, flow=flow)) as tracker:
        for outbox in unsent:
            run = _flow_run(tracker, recipe, root, flow, outbox)
            told.tell(run, recipe, steps)
            run.complete()
    end_flow(root.path / recipe.name, flow)


def _flow_run(
    tracker: "Tracker", recipe: Recipe, root: Storage, flow: str, outbox: Path
) -> "StepRun":
    # Stages that run side by side share this run.
    with in_turn(root.store, f"{recipe.name}/{TRACKING}"):
        begin_flow(outbox)
        run = tracker.flow_run(recipe.name, flow, outbox=outbox)
    run.origin(origin_tags(recipe.name, recipe.source))
    told.begin(run, recipe)
    return run


def _check_and_track(recipe: Recipe, root: Storage, flow: str) -> "Tracker":
    """Refuse impossible settings before anything is trained or tracked."""
    from pipelines.recipe.check import check
    from pipelines.runtime.tracking import Tracker

    check(recipe)
    # A stage that was submitted follows others: the address is right, the server may be away.
    patience = recipe.tracking.max_outage if in_job() else 0
    with in_turn(root.store, f"{recipe.name}/{TRACKING}"):
        return Tracker(
            recipe.tracking, storage=root, recipe=recipe.name, flow=flow, patience=patience
        )


def _status(error: BaseException) -> str:
    """The status of a run in MLflow: KILLED if interrupted, FAILED otherwise."""
    return "KILLED" if isinstance(error, KeyboardInterrupt | SystemExit) else "FAILED"


def _leave(error: BaseException) -> None:
    """End at once while trainings still wait for Ray in threads that cannot be interrupted.

    No finished work is lost: its files are on disk, and a local Ray ends with this process.
    """
    sys.stdout.flush()
    os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 130)


def _give_memory_back() -> None:
    """Return memory that earlier stages freed to the system; glibc would keep it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class _Runner:
    """Runs the steps of one flow, each with its MLflow run."""

    def __init__(
        self,
        recipe: Recipe,
        tracker: "Tracker",
        parent: "StepRun",
        steps: Mapping[str, PlannedStep],
        held: Mapping[str, Lock],
    ) -> None:
        self.recipe, self.tracker, self.parent, self.steps = recipe, tracker, parent, steps
        self.held = held
        self.active: dict[str, StepRun] = {}
        self.trainings_left = False
        self.fits = False  # the recipe fits the prepared images; checked once

    def run_stage(self, batch: Sequence[PlannedStep]) -> None:
        """The steps of one stage: trainings side by side as far as CPUs go, others in turn."""
        stage = STAGES[batch[0].step.stage]
        if stage.name != DATASET:
            self._check_on_images()
            end_idle_actors()  # Ray Data is not needed between two stages
            _give_memory_back()
        if stage.needs_cpus:
            release_workers()
        if not stage.in_lanes:
            for step in batch:
                self.run_step(step)
            return
        # In threads also when there is one: in the main thread Ray takes Ctrl-C over for good.
        lanes = min(len(batch), self._lanes())
        pool = ThreadPoolExecutor(lanes)
        futures = [pool.submit(self.run_step, step) for step in batch]
        try:
            wait(futures)
        except BaseException as error:  # Ctrl-C or SIGTERM, in the main thread
            self.trainings_left = True
            pool.shutdown(wait=False, cancel_futures=True)
            for run in self.active.values():
                run.finish(_status(error))
            raise
        for future in futures:
            future.result()

    def _check_on_images(self) -> None:
        """Refuse what does not fit the prepared images, before anything is trained on them."""
        from components.data.prepared import PreparedDataset
        from pipelines.recipe.check import check_on_images

        if self.fits:
            return
        dataset = PreparedDataset.open(self.steps[DATASET].contents())
        check_on_images(self.recipe, dataset)
        counts = ", ".join(f"{count} {split}" for split, count in dataset.splits.items())
        progress.say(f"{'items':<16} {counts}; attacks, evaluations and certificates use test")
        self.fits = True

    def _lanes(self) -> int:
        """Trainings that fit side by side."""
        cluster, workers = self.recipe.cluster, self.recipe.cluster.train_workers
        lanes = total_cpus() // (workers * cluster.cpus_per_train_worker)
        if gpus := workers * cluster.gpus_per_train_worker:
            lanes = min(lanes, int(total_gpus() // gpus))
        return max(1, lanes)

    def _storage_tag(self, planned: PlannedStep) -> dict[str, str]:
        """Where the files are: artifacts that a server keeps do not lead there."""
        root = planned.place.storage.root
        return {STORAGE_TAG: root} if is_server(self.tracker.uri) else {}

    def run_step(self, planned: PlannedStep) -> None:
        """One step from its inputs to its manifest."""
        step, began = planned.step, time.monotonic()
        scratch = planned.folder / SCRATCH
        run = self.tracker.step_run(self.parent, step.name, planned.fingerprint, folder=scratch)
        self.active[step.name] = run
        work = planned.place.work
        work.mkdir(parents=True, exist_ok=True)
        inputs = {n: self.steps[n].contents() for n in step.needs if self.steps[n].finished}
        out = StageDir(work, step.name, planned.fingerprint, run, inputs, planned.place)
        stage = STAGES[step.stage]
        progress.started(step.name)
        try:
            run.params(told.step_parameters(stage, step.identity))
            run.tags({FOLDER_TAG: planned.place.name, **self._storage_tag(planned)})
            run.origin(origin_tags(self.recipe.name, self.recipe.source))
            if DATASET in inputs:
                told.tell_dataset(run, self.recipe, inputs[DATASET], context=stage.context)
            with named(self.recipe.source, Recipe.model_fields):
                stage.load().run(self.recipe, inputs, out)
            run.artifacts(*(work / name for name in stage.logged))
            if DATASET not in inputs:
                told.tell_dataset(run, self.recipe, work, context=stage.context)
            run.complete()  # before the manifest: a finished step is complete in MLflow
            lock = self.held[planned.place.key]
            lock.check()
            out.finish(fence=lock.fence)
            announce(planned)
        except BaseException as error:
            run.finish(_status(error))
            raise
        finally:
            self.active.pop(step.name, None)
        progress.say(f"{step.name:<16} {time.monotonic() - began:6.1f} s     {planned.place.name}")


@contextmanager
def _stop_signals() -> Iterator[None]:
    """SIGTERM ends the flow like Ctrl-C: runs are marked KILLED, finished work stays.

    Installed after Ray has started, whose own handler would print a stack.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # the caller owns the signals
        return

    def stop(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
