"""The plan of a flow: the steps of all its stages, each with its fingerprint and its place."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from components.core.digests import digest_json
from components.core.errors import CasemateError
from components.core.folders import Folder, fetched
from pipelines.recipe.schema.recipe import Recipe
from pipelines.runtime.manifests import Manifest
from pipelines.runtime.storage import StepPlace, Storage
from pipelines.stages.registry import DATASET, GIVEN_VERSION, STAGES, Planning, Step, stages_of


@dataclass(frozen=True)
class PlannedStep:
    """A step with its fingerprint and its place in the storage."""

    step: Step
    fingerprint: str
    place: StepPlace
    own: StepPlace  # in the recipe's own folder; `place` may be that of an equal step elsewhere

    @property
    def name(self) -> str:
        return self.step.name

    @property
    def given(self) -> bool:
        """Whether the folder was made elsewhere: flows do not write it; its content is hashed."""
        return self.step.given is not None

    @property
    def folder(self) -> Path:
        """On this machine: where the step is written, or the given folder."""
        return fetched(self.step.given) if self.step.given else self.place.path

    @property
    def finished(self) -> bool:
        return self.given or self.place.is_finished(self.fingerprint)

    def contents(self) -> Folder:
        """The files of a finished step, as they are now whatever `--force` does later."""
        return self.step.given or self.place.open()

    def shown(self) -> Folder:
        """The folder to show to people and to return to callers."""
        return self.step.given or (
            self.folder if self.place.storage.is_local else self.place.open()
        )

    def manifest(self) -> Manifest | None:
        return self.place.manifest()


def steps_of(recipe: Recipe, *, prepared: Folder | None = None) -> list[Step]:
    """The steps of a recipe, each after the steps it needs."""
    found: list[Step] = []
    for stage in STAGES.values():
        found += stage.steps().steps(Planning(recipe, prepared, tuple(found)))
    return found


def plan(
    recipe: Recipe, storage: str | Path | Storage, *, prepared: Folder | None = None
) -> list[PlannedStep]:
    """Every step with fingerprint and place: sections + inputs' fingerprints + formula version.

    `prepared` is a finished dataset to use instead of the recipe's own.
    """
    root, prints = Storage.at(storage), dict[str, str]()
    planned = []
    for step in steps_of(recipe, prepared=prepared):
        prints[step.name] = fingerprint_of(step, prints)
        place = root.step(recipe.name, f"{step.name}-{prints[step.name][:12]}")
        planned.append(PlannedStep(step, prints[step.name], place, place))
    return planned


def fingerprint_of(step: Step, prints: Mapping[str, str]) -> str:
    """The fingerprint of a step, from those of the steps it needs."""
    return digest_json(
        {
            "stage": step.stage,
            "version": STAGES[step.stage].version if step.stage in STAGES else GIVEN_VERSION,
            "identity": step.identity,
            "inputs": {need: prints[need] for need in step.needs},
        }
    )


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


def stage_needs(recipe: Recipe) -> dict[str, set[str]]:
    """The stages of a recipe, each with the stages it needs; the data are not read."""
    found = [Step(DATASET)]
    for stage in STAGES.values():  # also the one without a section that plans a given model
        if stage.name != DATASET:
            found += stage.steps().steps(Planning(recipe, earlier=tuple(found)))
    stage_of = {step.name: step.stage for step in found}
    needs: dict[str, set[str]] = {stage.name: set() for stage in stages_of(recipe)}
    for step in found:
        if step.stage in needs:
            needs[step.stage] |= {stage_of[need] for need in step.needs}
    return {stage: (above & needs.keys()) - {stage} for stage, above in needs.items()}
