"""Plan of the train stage: one step per model, or the given model."""

import json
from collections.abc import Mapping
from dataclasses import replace

from components.core.errors import CasemateError
from components.core.folders import Folder, absolute, folder_at
from components.core.settings import plain
from components.denoising.settings import is_on_disk
from components.models.settings import ModelSettings
from components.train.objectives.settings import DenoisedTrainingSettings, ObjectiveSettings
from components.train.settings import TrainSettings
from pipelines.recipe.schema.recipe import MAIN, Recipe
from pipelines.stages.registry import DATASET, Planning, Step


def steps(planning: Planning) -> list[Step]:
    """Every model of the recipe; what is trained behind a denoiser comes after the others."""
    recipe = planning.recipe
    if given := recipe.given_model():
        place = folder_at(absolute(given))  # workers start in other folders
        return [replace(given_step(_model_digest(given)), given=place)]
    if recipe.train is None:
        return []
    names = sorted(recipe.model_names(), key=lambda name: recipe.denoiser_of(name) is not None)
    return [_training(recipe, recipe.train, name) for name in names]


def given_step(digest: str) -> Step:
    """The step of a model with this digest that the recipe does not train."""
    return Step("model", MAIN, identity={"digest": digest})


def metrics(finished: Mapping[str, Folder]) -> dict[str, float]:
    """Validation figures of the epoch whose weights a model has."""
    values: dict[str, float] = {}
    for part, folder in finished.items():
        final = json.loads((folder / "metrics.json").read_text())["final"]
        found = {name: value for name, value in final.items() if name.startswith("val_")}
        values |= {f"train/{part}/{n}": float(v) for n, v in found.items() if v is not None}
    return values


def _training(recipe: Recipe, section: TrainSettings, model: str) -> Step:
    behind = recipe.denoiser_of(model)
    identity = {
        "seed": recipe.seed,
        "train": plain(section, exclude={"objective", "variants", "epochs"}),
        "model": model_identity(recipe.model_of(model)),
        "objective": _objective_identity(recipe.objective_of(model)),
        "epochs": recipe.epochs_of(model),
    }
    return Step("train", model, (DATASET, *([f"train.{behind}"] if behind else [])), identity)


def model_identity(section: ModelSettings) -> dict[str, object]:
    """The model section; a folder of pretrained weights counts by its digest, not by its path."""
    values: dict[str, object] = plain(section)
    start = section.pretrained
    if start and is_on_disk(start):
        values["pretrained"] = _source_digest(start)
    elif start and start != "timm":
        values["pretrained"] = _model_digest(folder_at(start))
    return values


def _objective_identity(objective: ObjectiveSettings) -> dict[str, object]:
    """The objective section; a denoiser on disk counts by its content, not by its path."""
    values: dict[str, object] = plain(objective)
    if isinstance(objective, DenoisedTrainingSettings) and is_on_disk(objective.denoiser):
        values["denoiser"] = _source_digest(objective.denoiser)
    return values


def _source_digest(source: str) -> str:
    """The content of a denoiser on disk."""
    from components.denoising.loading import source_digest

    return source_digest(source)


def _model_digest(folder: Folder) -> str:
    """The digest of the model folder that the recipe names."""
    from components.models.checkpoint import read_header

    if not (folder / "model.json").is_file():
        remedy = "is not a model folder: it has no model.json; casemate import-weights writes one"
        raise CasemateError("model.pretrained", folder, remedy)
    return str(read_header(folder)["digest"])
