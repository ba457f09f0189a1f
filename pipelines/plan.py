"""The plan of a flow: which steps a recipe asks for, in which order, under which fingerprint."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.core.digests import digest_json
from components.core.errors import CasemateError
from pipelines.recipe import Recipe
from pipelines.runtime.artifacts import is_finished

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
    steps = [Step("prepare", identity={"data": _data_identity(recipe)})]
    shared = {"model": _model_identity(recipe), "seed": recipe.seed}
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


def _model_identity(recipe: Recipe) -> dict[str, Any]:
    """The model section; a folder of pretrained weights counts by its digest, not by its place."""
    from components.models.checkpoint import read_header

    values = recipe.model.model_dump(mode="json")
    start = recipe.model.pretrained
    if start and start != "timm":
        values["pretrained"] = read_header(Path(start).expanduser())["digest"]
    return values


def _data_identity(recipe: Recipe) -> dict[str, Any]:
    """The data section with the content of its files in place of their paths."""
    values = recipe.data.model_dump(mode="json", exclude={"shard_size"})
    parts = [values, values["synthetic"]] if values["synthetic"] else [values]
    for part in parts:
        part |= _content(part["source"], part.pop("path"), part.pop("options"))
    return values


def _content(source: str, path: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """What a source's files hold, and those of its options that name no file."""
    from components.data.sources.stamp import source_stamp

    plain = {k: v for k, v in options.items() if not (isinstance(v, str) and Path(v).is_file())}
    return {"content": source_stamp(source, path, options), "options": plain}


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
