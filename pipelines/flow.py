"""The flow: which steps a recipe asks for, in which order, and what is already done."""

import importlib
import json
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from components.core.digests import digest_json
from components.core.errors import CasemateError
from pipelines.recipe import Recipe
from pipelines.runtime import progress
from pipelines.runtime.artifacts import exclusive, is_finished, prepare_storage

STAGES = ("prepare", "train", "tune", "attack", "certify", "report")

# Raised by hand when a stage's formula changes, so that old results are not taken for new ones.
VERSIONS = {"prepare": 1, "train": 1, "tune": 1, "attack": 1, "certify": 1, "report": 1}


@dataclass(frozen=True)
class Step:
    """One stage for one part of the recipe; `identity` is everything its result depends on."""

    stage: str
    part: str = ""
    needs: tuple[str, ...] = ()
    identity: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.stage}.{self.part}" if self.part else self.stage


@dataclass(frozen=True)
class PlannedStep:
    """A step with its fingerprint and its folder."""

    step: Step
    fingerprint: str
    folder: Path

    @property
    def name(self) -> str:
        return self.step.name

    @property
    def finished(self) -> bool:
        return is_finished(self.folder, self.fingerprint)


def steps_of(recipe: Recipe) -> list[Step]:
    """The steps of a recipe, every one after what it needs."""
    steps = [Step("prepare", identity={"data": _data_identity(recipe), "seed": recipe.seed})]
    shared = {"model": recipe.model.model_dump(mode="json"), "seed": recipe.seed}
    if recipe.train:
        common = recipe.train.model_dump(mode="json", exclude={"objective", "variants", "epochs"})
        for model in recipe.model_names():
            own = {
                "objective": recipe.objective_of(model).model_dump(mode="json"),
                "epochs": recipe.epochs_of(model),
            }
            steps.append(Step("train", model, ("prepare",), {**shared, "train": common, **own}))
    if recipe.tune:
        train = recipe.train.model_dump(mode="json", exclude={"variants"}) if recipe.train else None
        identity = {**shared, "train": train, "tune": recipe.tune.model_dump(mode="json")}
        steps.append(Step("tune", "", ("prepare",), identity))
    for name, attack in recipe.attack.items():
        needs = ("prepare", *(f"train.{m}" for m in attack.models))
        steps.append(
            Step(
                "attack",
                name,
                needs,
                {"attack": attack.model_dump(mode="json"), "seed": recipe.seed},
            )
        )
    for name, certify in recipe.certify.items():
        needs = ("prepare", f"train.{certify.model}")
        identity = {"certify": certify.model_dump(mode="json"), "seed": recipe.seed}
        steps.append(Step("certify", name, needs, identity))
    everything = tuple(step.name for step in steps)
    identity = {"report": recipe.report.model_dump(mode="json"), "name": recipe.name}
    return [*steps, Step("report", "", everything, identity)]


def stages_of(recipe: Recipe) -> list[str]:
    """The stages that a recipe has work for; needs no look at the data."""
    asked = {
        "train": recipe.train,
        "tune": recipe.tune,
        "attack": recipe.attack,
        "certify": recipe.certify,
    }
    return [stage for stage in STAGES if asked.get(stage, True)]


def _data_identity(recipe: Recipe) -> dict[str, Any]:
    """The data section with the content of its files in place of their path."""
    from components.data.sources.stamp import source_stamp

    values = recipe.data.model_dump(mode="json", exclude={"path", "shard_size"})
    return {**values, "content": source_stamp(recipe.data.source, recipe.data.path)}


def plan(recipe: Recipe, storage: Path) -> list[PlannedStep]:
    """Every step with fingerprint and folder: sections + inputs' fingerprints + formula version."""
    prints: dict[str, str] = {}
    planned = []
    for step in steps_of(recipe):
        prints[step.name] = digest_json(
            {
                "stage": step.stage,
                "version": VERSIONS[step.stage],
                "identity": step.identity,
                "inputs": {need: prints[need] for need in step.needs},
            }
        )
        folder = storage / recipe.name / f"{step.name}-{prints[step.name][:12]}"
        planned.append(PlannedStep(step, prints[step.name], folder))
    return planned


def select(steps: Sequence[PlannedStep], until: str | None) -> list[PlannedStep]:
    """All steps, or those of one stage with everything they need."""
    if until is None:
        return list(steps)
    wanted = {step.name for step in steps if step.step.stage == until}
    if not wanted:
        raise CasemateError("stage", until, "has nothing to do: the recipe has no such section")
    for step in reversed(steps):
        if step.name in wanted:
            wanted |= set(step.step.needs)
    return [step for step in steps if step.name in wanted]


def run_flow(
    recipe: Recipe,
    *,
    storage: str | Path | None = None,
    address: str | None = None,
    force: bool = False,
    until: str | None = None,
) -> list[PlannedStep]:
    """Run what is not finished yet, here or at `address`; returns the selected steps."""
    place = str(storage or recipe.storage.root)
    if "://" in place:  # a path would quietly become a local folder of that name
        raise CasemateError("storage.root", place, "is not a folder; mount it and name its folder")
    root = prepare_storage(Path(place))
    with exclusive(root / recipe.name):
        everything = plan(recipe, root)
        steps = select(everything, until)
        again = {s.name for s in steps if until in (None, s.step.stage)} if force else set()
        todo = [step for step in steps if step.name in again or not step.finished]
        for step in steps:
            if step not in todo:
                progress.say(f"{step.name:<16} done before  {step.folder.name}")
        if todo:
            flow = digest_json({step.name: step.fingerprint for step in everything})
            with _stop_signals():
                _execute(
                    recipe,
                    root,
                    todo,
                    all_steps=everything,
                    flow=flow,
                    address=address,
                    again=again,
                )
    return steps


def _execute(
    recipe: Recipe,
    root: Path,
    todo: Sequence[PlannedStep],
    *,
    all_steps: Sequence[PlannedStep],
    flow: str,
    address: str | None,
    again: set[str],
) -> None:
    """Connect tracking and Ray, then run the missing steps stage by stage."""
    if place := address or recipe.cluster.address:
        from pipelines.runtime.cluster import check_reachable

        check_reachable(place)  # before a tracking store is made for a flow that cannot start
    with ThreadPoolExecutor(1) as pool:  # both take seconds: overlap them
        tracking = pool.submit(_open_tracking, recipe, root)
        from pipelines.runtime.cluster import ray_cluster

        with ray_cluster(recipe.cluster, address=address):
            tracker = tracking.result()
            for step in todo:
                if step.name in again:
                    tracker.supersede(step.name, step.fingerprint)
                    shutil.rmtree(step.folder, ignore_errors=True)
            parent = tracker.flow_run(recipe, flow)
            runner = _Runner(recipe, tracker, parent, {step.name: step for step in all_steps})
            try:
                for _, batch in groupby(todo, key=lambda step: step.step.stage):
                    runner.run_stage(list(batch))
            except BaseException as error:
                parent.finish(_status(error))
                raise
            parent.finish()


def _open_tracking(recipe: Recipe, root: Path) -> Any:
    from pipelines.runtime.tracking import Tracker

    return Tracker(uri=recipe.tracking.uri, experiment=recipe.tracking.experiment, storage=root)


def _status(error: BaseException) -> str:
    from pipelines.runtime.tracking import status_of

    return status_of(error)


class _Runner:
    """Runs steps of one flow; a step's MLflow run tells how it ended."""

    def __init__(
        self, recipe: Recipe, tracker: Any, parent: Any, steps: Mapping[str, PlannedStep]
    ) -> None:
        self.recipe, self.tracker, self.parent, self.steps = recipe, tracker, parent, steps
        self.stopped = False

    def run_stage(self, batch: Sequence[PlannedStep]) -> None:
        """The steps of one stage: trainings side by side as far as CPUs go, others in turn."""
        from pipelines.runtime.shards import release_workers

        if batch[0].step.stage in ("prepare", "train", "tune"):
            release_workers()
        lanes = self._lanes() if batch[0].step.stage == "train" else 1
        if lanes == 1 or len(batch) == 1:
            for step in batch:
                self.run_step(step)
            return
        pool = ThreadPoolExecutor(min(lanes, len(batch)))
        futures = [pool.submit(self.run_step, step) for step in batch]
        try:
            wait(futures)
        except BaseException:  # stopped: leaving disconnects Ray, which ends the trainings
            self.stopped = True
            raise
        finally:
            pool.shutdown(wait=not self.stopped, cancel_futures=True)
        for future in futures:
            future.result()

    def _lanes(self) -> int:
        from pipelines.runtime.cluster import total_cpus

        cluster = self.recipe.cluster
        return max(1, total_cpus() // (cluster.train_workers * cluster.cpus_per_train_worker))

    def run_step(self, planned: PlannedStep) -> None:
        import time

        from pipelines.runtime.artifacts import StageDir

        step, began = planned.step, time.monotonic()
        run = self.tracker.step_run(self.parent, step.name, planned.fingerprint)
        planned.folder.mkdir(parents=True, exist_ok=True)
        inputs = {
            n: self.steps[n].folder
            for n in step.needs
            if n in self.steps and self.steps[n].finished
        }
        out = StageDir(planned.folder, step.name, planned.fingerprint, run, inputs)
        stage = importlib.import_module(f"pipelines.stages.{step.stage}")
        try:
            run.params({step.stage: step.identity})
            run.tags(
                {
                    "casemate.fingerprint": planned.fingerprint,
                    "casemate.folder": planned.folder.name,
                }
            )
            stage.run(self.recipe, inputs, out)
            if step.stage == "report":  # the one stage that knows nothing of tracking
                run.artifacts(planned.folder / "report.html")
            self._log_dataset(run, step.stage, inputs.get("prepare", planned.folder))
            out.finish()
        except BaseException as error:
            run.finish("KILLED" if self.stopped else _status(error))
            raise
        run.finish()
        progress.say(f"{step.name:<16} {time.monotonic() - began:6.1f} s     {planned.folder.name}")

    def _log_dataset(self, run: Any, stage: str, prepared: Path) -> None:
        """Tie the run to the prepared images by their digest."""
        from components.data.prepared import PreparedDataset

        dataset = PreparedDataset.open(prepared)
        known = {"train": "training", "tune": "tuning", "prepare": "preparation"}
        run.dataset(
            name=self.recipe.data.source,
            digest=dataset.digest,
            source=str(prepared),
            context=known.get(stage, "testing"),
            profile={"splits": dataset.splits, "classes": len(dataset.classes)},
        )


@contextmanager
def _stop_signals() -> Iterator[None]:
    """SIGTERM ends the flow like Ctrl-C: runs are marked KILLED, finished work stays."""

    def stop(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread: the caller owns the signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def folder_of(steps: Sequence[PlannedStep], name: str) -> Path | None:
    """The folder of a finished step."""
    return next((s.folder for s in steps if s.name == name and s.finished), None)


def summary(steps: Sequence[PlannedStep]) -> list[dict[str, Any]]:
    """Headline rows of finished attacks and certificates: what, model, accuracy, interval."""
    rows: list[dict[str, Any]] = []
    for step in steps:
        if step.step.stage == "attack" and step.finished:
            result = json.loads((step.folder / "summary.json").read_text())
            for model, values in result["models"].items():
                eps = result["threat"]["eps"]
                rows.append(_headline("clean", model, values["clean_accuracy"]))
                rows.append(_headline(f"PGD linf {eps:g}", model, values["robust_accuracy"]))
        if step.step.stage == "certify" and step.finished:
            document = json.loads((step.folder / "certificate.json").read_text())
            model = step.step.identity["certify"]["model"]
            rows.append(
                _headline("smoothed, clean", model, document["summary"]["standard_accuracy"])
            )
            for entry in document["summary"]["certified"]:
                at = (
                    f"l2 {entry['radius']:g}"
                    if "radius" in entry
                    else f"patch {entry['patch_size']}px"
                )
                rows.append(_headline(f"certified {at}", model, entry["accuracy"]))
    return rows


def _headline(what: str, model: str, value: Mapping[str, Any]) -> dict[str, Any]:
    return {"what": what, "model": model, **value}
