"""The plan of a flow: which steps a recipe asks for, in which order, under which fingerprint."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.core.digests import digest_json
from components.core.errors import CasemateError
from components.core.settings import plain
from components.denoising.settings import is_on_disk
from components.models.settings import ModelSettings
from components.train.objectives.settings import DenoisedTrainingSettings, ObjectiveSettings
from pipelines.recipe.schema.place import ReportSection
from pipelines.recipe.schema.recipe import MAIN, Recipe
from pipelines.runtime.artifacts import is_finished

STAGES = ("prepare", "train", "tune", "attack", "certify", "report")

# Raised by hand when a stage's formula changes, so that old results are not taken for new ones.
VERSIONS = {
    "prepare": 2,
    "model": 1,
    "train": 3,
    "tune": 4,
    "attack": 3,
    "certify": 2,
    "denoiser": 1,
    "report": 3,
}


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

    @property
    def waits(self) -> bool:
        """Whether it needs another step of its own stage."""
        return any(need.startswith(f"{self.stage}.") for need in self.needs)


@dataclass(frozen=True)
class PlannedStep:
    """A step with its fingerprint and its folder."""

    step: Step
    fingerprint: str
    folder: Path
    given: bool = False  # made elsewhere: its content is its fingerprint, and nobody writes there

    @property
    def name(self) -> str:
        return self.step.name

    @property
    def finished(self) -> bool:
        return self.given or is_finished(self.folder, self.fingerprint)


def steps_of(recipe: Recipe, *, prepared: Path | None = None) -> list[Step]:
    """The steps of a recipe, every one after what it needs."""
    steps = [Step("prepare", identity={"data": _data_identity(recipe, prepared)})]
    if given := recipe.given_model():
        steps.append(Step("model", MAIN, identity={"digest": _model_digest(given)}))
    shared = {"model": _model_identity(recipe.model), "seed": recipe.seed}
    if recipe.train:
        common = plain(recipe.train, exclude={"objective", "variants", "epochs"})
        # what is trained behind a denoiser of the recipe comes after all that is not
        for model in sorted(recipe.model_names(), key=lambda m: recipe.denoiser_of(m) is not None):
            own = {
                "model": _model_identity(recipe.model_of(model)),
                "objective": _objective_identity(recipe.objective_of(model)),
                "epochs": recipe.epochs_of(model),
            }
            behind = recipe.denoiser_of(model)
            needs = ("prepare", *([f"train.{behind}"] if behind else []))
            steps.append(Step("train", model, needs, {**shared, "train": common, **own}))
    if recipe.tune:
        train = plain(recipe.train, exclude={"variants"}) if recipe.train else None
        identity = {**shared, "train": train, "tune": recipe.tune.model_dump(mode="json")}
        steps.append(Step("tune", "", ("prepare",), identity))
    for name, attack in recipe.attack.items():
        models = dict.fromkeys([*attack.models, *([attack.surrogate] if attack.surrogate else [])])
        needs = ("prepare", *(model_step(recipe, m) for m in models))
        steps.append(
            Step(
                "attack",
                name,
                needs,
                {"attack": attack.model_dump(mode="json"), "seed": recipe.seed},
            )
        )
    for name, entry in recipe.certificates().items():
        certify = entry.section
        needs = ("prepare", model_step(recipe, certify.model))
        needs += (f"certify.{entry.finer}",) if entry.finer else ()
        if behind := recipe.certified_behind(certify):
            needs += (f"train.{behind}",)
        elif source := certify.denoiser_on_disk:
            steps.append(Step("denoiser", name, identity={"digest": _source_digest(source)}))
            needs += (steps[-1].name,)
        identity = {"certify": certify.identity(_source_digest), "seed": recipe.seed}
        steps.append(Step("certify", name, needs, identity))
    everything = tuple(step.name for step in steps)
    identity = {"report": _report_identity(recipe.report), "name": recipe.name}
    return [*steps, Step("report", "", everything, identity)]


def model_step(recipe: Recipe, model: str) -> str:
    """The step whose folder holds a model of the recipe."""
    return f"model.{model}" if recipe.given_model() else f"train.{model}"


def stages_of(recipe: Recipe) -> list[str]:
    """The stages that a recipe has work for; needs no look at the data."""
    asked = {
        "train": recipe.train,
        "tune": recipe.tune,
        "attack": recipe.attack,
        "certify": recipe.certify,
    }
    return [stage for stage in STAGES if asked.get(stage, True)]


def _report_identity(section: ReportSection) -> dict[str, Any]:
    """The report section; tables to compare with count by their content, not by their place."""
    from components.core.digests import digest_file

    values = section.model_dump(mode="json")
    for name, entry in values["compare"].items():
        path = Path(entry["path"]).expanduser()
        if not path.is_file():
            remedy = "is not a file; casemate export-tsv writes such tables"
            raise CasemateError(f"report.compare.{name}.path", path, remedy)
        entry["path"] = digest_file(path)
    if not values["compare"]:  # reports made before this key existed keep their fingerprints
        del values["compare"]
    return values


def _objective_identity(objective: ObjectiveSettings) -> dict[str, Any]:
    """The objective section; a denoiser on disk counts by its content, not by its place."""
    values: dict[str, Any] = plain(objective)
    if isinstance(objective, DenoisedTrainingSettings) and is_on_disk(objective.denoiser):
        values["denoiser"] = _source_digest(objective.denoiser)
    return values


def _source_digest(source: str) -> str:
    """The content of a denoiser on disk."""
    from components.denoising.loading import source_digest

    return source_digest(source)


def _model_identity(section: ModelSettings) -> dict[str, Any]:
    """The model section; a folder of pretrained weights counts by its digest, not by its place."""
    values: dict[str, Any] = plain(section)
    start = section.pretrained
    if start and is_on_disk(start):
        values["pretrained"] = _source_digest(start)
    elif start and start != "timm":
        values["pretrained"] = _model_digest(Path(start).expanduser())
    return values


def _model_digest(folder: Path) -> str:
    """The digest of the model folder that the recipe names."""
    from components.models.checkpoint import read_header

    if not (folder / "model.json").is_file():
        remedy = "is no model folder: it has no model.json; casemate import-weights writes one"
        raise CasemateError("model.pretrained", folder, remedy)
    return str(read_header(folder)["digest"])


def _data_identity(recipe: Recipe, prepared: Path | None) -> dict[str, Any]:
    """The data section with the content of its files in place of their paths."""
    if prepared:
        from components.data.stream import read_page

        return {"digest": read_page(prepared / "dataset.json")["digest"]}
    values: dict[str, Any] = plain(recipe.data)  # shard_size too: it orders streamed training
    parts = [values, values["synthetic"]] if values["synthetic"] else [values]
    for part in parts:
        part |= _content(part["source"], part.pop("path"), part.pop("options"))
    return values


def _content(source: str, path: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """What a source's files hold, and those of its options that name no file."""
    from components.data.sources.stamp import named_files, source_stamp

    files = named_files(source, options)
    plain = {key: value for key, value in options.items() if key not in files}
    return {"content": source_stamp(source, path, options), "options": plain}


def plan(recipe: Recipe, storage: Path, *, prepared: Path | None = None) -> list[PlannedStep]:
    """Every step with fingerprint and folder: sections + inputs' fingerprints + formula version.

    `prepared` is a finished dataset that stands in for the prepare step.
    """
    model = recipe.given_model()  # absolute: workers start in other folders
    given = {"prepare": prepared, f"model.{MAIN}": model and model.absolute()}
    for name, certify in recipe.certify.items():
        if source := certify.denoiser_on_disk:
            folder = Path(source.partition(":")[2]).expanduser()
            given[f"denoiser.{name}"] = folder.absolute()
    prints: dict[str, str] = {}
    planned = []
    for step in steps_of(recipe, prepared=prepared):
        prints[step.name] = digest_json(
            {
                "stage": step.stage,
                "version": VERSIONS[step.stage],
                "identity": step.identity,
                "inputs": {need: prints[need] for need in step.needs},
            }
        )
        own = storage / recipe.name / f"{step.name}-{prints[step.name][:12]}"
        place = given.get(step.name)
        planned.append(PlannedStep(step, prints[step.name], place or own, given=place is not None))
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
