"""Plan of the evaluate stage: one step per suite, and its headline figures."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from components.core.errors import at_key
from components.core.settings import plain
from components.evaluate.settings import (
    PREPARED,
    CorruptionSuiteSettings,
    ShapeBiasSuiteSettings,
    ShiftSuiteSettings,
)
from pipelines.recipe.schema.evaluate import CLEAN, EvaluateSection, suite_of
from pipelines.stages.registry import DATASET, Planning, Step, stored_headlines, stored_metrics

OTHER = "other_model"  # steps of model folders that only the transfer suite names
ANY_FOLDER = "folder"  # source whose stamp is that of all files


def steps(planning: Planning) -> list[Step]:
    """A step for each suite, and one for trained classifiers that nothing else measures.

    Corrupted images are compared with the clean ones.
    """
    recipe, section = planning.recipe, planning.recipe.evaluation()
    if section is None:
        return []
    folders = section.transfer.models if section.transfer else {}
    others = given_models(OTHER, "evaluate.transfer.models", folders)
    found = list(others)
    for part, models in recipe.evaluation_parts().items():
        suite = suite_of(part)
        needs = [DATASET, *(recipe.step_of(model) for model in models)]
        if suite == "corruptions":
            needs.append(f"evaluate.{CLEAN}")
        if suite == "transfer":
            needs += [step.name for step in others]
        identity = {
            "suite": suite,
            "settings": IDENTITIES[suite](section),
            "subset": plain(section.subset),
            "models": models,
            "micro_batch": section.micro_batch,
            "seed": recipe.seed,
        }
        if any(shift.fit is None for shift in section.shifts.values()) and suite == "shifts":
            # A given dataset says nothing of the recipe's fit, which shifts take over.
            identity["fit"] = [recipe.data.fit, recipe.data.resize]
        found.append(Step("evaluate", part, tuple(needs), identity))
    return found


headlines = stored_headlines
metrics = partial(stored_metrics, "evaluate")


def given_models(stage: str, key: str, folders: Mapping[str, str]) -> list[Step]:
    """A step of `stage` for each model folder under `key`; a folder counts by its digest."""
    found = []
    for name, path in folders.items():
        folder = Path(path).expanduser().absolute()
        with at_key(f"{key}.{name}"):
            from components.models.checkpoint import read_header

            digest = str(read_header(folder)["digest"])
        found.append(Step(stage, name, identity={"digest": digest}, given=folder))
    return found


def _clean(section: EvaluateSection) -> dict[str, Any]:
    return {"calibration": plain(section.calibration)}


def _corruptions(section: EvaluateSection) -> dict[str, Any]:
    assert section.corruptions is not None
    values: dict[str, Any] = plain(section.corruptions)
    return values | corruption_files(section.corruptions)


def corruption_files(settings: CorruptionSuiteSettings) -> dict[str, str | None]:
    """Digests of the published images and of the textures."""
    found: dict[str, str | None] = {"path": None, "textures": None}
    if settings.path is not None:
        found["path"] = _stamp("evaluate.corruptions.path", settings.source, settings.path)
    if settings.textures is not None:
        from components.core.digests import digest_file, digest_json
        from components.data.corruptions.textures import texture_files

        with at_key("evaluate.corruptions.textures"):
            files = texture_files(settings.textures)
            found["textures"] = digest_json([digest_file(file) for file in files])
    return found


def _shifts(section: EvaluateSection) -> dict[str, Any]:
    found = {}
    for name, shift in section.shifts.items():
        values: dict[str, Any] = plain(shift, exclude={"path", "options"})
        found[name] = values | shifted_files(f"evaluate.shifts.{name}.path", shift)
    return found


def shifted_files(key: str, shift: ShiftSuiteSettings) -> dict[str, Any]:
    """The digest of a shifted dataset, and the options that do not name a file."""
    from components.data.sources.stamp import named_files
    from components.data.stream import read_document

    if shift.source == PREPARED:
        assert shift.path is not None
        with at_key(key):
            document = read_document(Path(shift.path).expanduser() / "dataset.json")
        return {"content": document["digest"]}
    files = named_files(shift.source, shift.options)
    options = {name: value for name, value in shift.options.items() if name not in files}
    return {"content": _stamp(key, shift.source, shift.path, shift.options), "options": options}


def _shape_bias(section: EvaluateSection) -> dict[str, Any]:
    assert section.shape_bias is not None
    values: dict[str, Any] = plain(section.shape_bias)
    return values | {"path": shape_bias_files(section.shape_bias)}


def shape_bias_files(settings: ShapeBiasSuiteSettings) -> str:
    """Digest of the stimuli."""
    return _stamp("evaluate.shape_bias.path", ANY_FOLDER, settings.path)


def _transfer(section: EvaluateSection) -> dict[str, Any]:
    values: dict[str, Any] = plain(section.transfer)
    return values | {"models": sorted(values["models"])}


def _spatial(section: EvaluateSection) -> dict[str, Any]:
    values: dict[str, Any] = plain(section.spatial)
    return values


IDENTITIES: dict[str, Callable[[EvaluateSection], dict[str, Any]]] = {
    CLEAN: _clean,
    "corruptions": _corruptions,
    "shifts": _shifts,
    "shape_bias": _shape_bias,
    "transfer": _transfer,
    "spatial": _spatial,
}


def _stamp(key: str, source: str, path: str | None, options: dict[str, Any] | None = None) -> str:
    from components.data.sources.stamp import source_stamp

    with at_key(key):
        return source_stamp(source, path, options)
