"""The models that a user names for a card: folders, trainings, flows, MLflow's runs, versions."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from components.core.errors import CasemateError
from components.core.folders import Folder, within
from components.core.object_stores import is_uri
from pipelines.api.contenders import RUN_ID, results_of_run, store_of
from pipelines.api.found_results import STEP_NAME, FoundResult, results_at
from pipelines.api.item_verdicts import models_of

if TYPE_CHECKING:
    from pipelines.runtime.registered_models import Version

KEY = "card"
TRAIN, GIVEN = "train.", "model."
MODEL_FILE = "model.json"


@dataclass(frozen=True)
class NamedModel:
    """A model, the training that made it if that is there, and where its results are searched."""

    name: str
    digest: str
    folder: Folder
    training: FoundResult | None = None
    roots: tuple[str, ...] = ()
    version: "Version | None" = None  # as it was named


def named_models(
    place: str,
    *,
    chosen: Collection[str] = (),
    storage: str | Path | None = None,
    tracking: str | None = None,
) -> list[NamedModel]:
    """The models at a place, each once; `chosen` are names of those of a flow."""
    found = list(_distinct(_at(place, storage, tracking)))
    names = {model.name for model in found}
    if unknown := [name for name in chosen if name not in names]:
        remedy = f"is not a model of {place}; it has {', '.join(sorted(names))}"
        raise CasemateError("model", unknown[0], remedy)
    return [model for model in found if not chosen or model.name in chosen]


def _distinct(models: Sequence[NamedModel]) -> Iterator[NamedModel]:
    """Each digest once, the first that has its training."""
    for digest in dict.fromkeys(model.digest for model in models):
        same = [model for model in models if model.digest == digest]
        yield next((model for model in same if model.training), same[0])


def _at(place: str, storage: str | Path | None, tracking: str | None) -> list[NamedModel]:
    if place.startswith("models:"):
        return _registered(place, storage, tracking)
    if run := RUN_ID.fullmatch(place):
        return _of_run(run[1], place, storage, tracking)
    if place.startswith("mlflow:"):
        raise CasemateError(KEY, place, "is not a run of MLflow; write mlflow: and 32 hex digits")
    if is_uri(place):
        return _stored(place)
    path = Path(place).expanduser()
    if not path.exists():
        raise CasemateError(KEY, place, "does not exist")
    if not path.is_dir():
        raise CasemateError(KEY, place, "is a file; name a model folder, a training or a flow")
    return _local(path, place)


# -- folders and URIs


def _local(path: Path, place: str) -> list[NamedModel]:
    folder = path.resolve()
    if (folder / MODEL_FILE).is_file():
        above = folder.parent
        is_step = folder.name == "model" and STEP_NAME.fullmatch(above.name)
        if is_step and above.name.startswith(TRAIN):
            return _of_steps(results_at(above), place)
        return [_alone(folder, str(folder))]
    if (folder / "model" / MODEL_FILE).is_file() and folder.name.startswith(TRAIN):
        return _of_steps(results_at(folder), place)
    return _of_flow(place, results_at(folder))


def _stored(place: str) -> list[NamedModel]:
    from pipelines.runtime.storage import STEP_URI

    step = STEP_URI.fullmatch(place.rstrip("/"))
    if step is None:
        return _of_flow(place, results_at(place))
    root, flow, name, inner = step.groups()
    if not name.startswith(TRAIN) or inner not in (None, "model"):
        raise CasemateError(KEY, place, "is not a model, a training or a flow")
    return _of_steps(results_at(f"{root}/{flow}/{name}"), place)


def _alone(folder: Folder, place: str) -> NamedModel:
    """A model that no flow has made, or was copied out of one."""
    header = _header(folder)
    name = folder.name
    if name == "model" and isinstance(folder, Path):
        name = folder.parent.name
    return NamedModel(name, str(header["digest"]), folder)


def _header(folder: Folder) -> dict[str, object]:
    from components.models.checkpoint import read_header

    return read_header(folder)


def _of_flow(place: str, results: Sequence[FoundResult]) -> list[NamedModel]:
    flows = sorted({result.flow for result in results if result.manifest})
    if len(flows) > 1:
        remedy = f"is a storage of {len(flows)} flows; name one: {', '.join(flows[:30])}"
        raise CasemateError(KEY, place, remedy)
    return _of_steps(results, place)


def _of_steps(results: Sequence[FoundResult], place: str) -> list[NamedModel]:
    """The classifiers that steps of a flow have trained, and those it was given."""
    from components.report.card.reading import is_denoiser

    found = [m for result in results for m in _trained(result)]
    found += [m for result in results for m in _inputs(result)]
    kept = [model for model in found if not is_denoiser(model.folder)]
    if not kept:
        why = "is a denoiser, which has no card" if found else "holds no finished model"
        raise CasemateError(KEY, place, f"{why}; name a model folder, a training or a flow")
    return kept


def _trained(result: FoundResult) -> Iterator[NamedModel]:
    if result.manifest is None or not result.step.startswith(TRAIN):
        return
    folder = within(result.files, "model")
    digest = str(_header(folder)["digest"])
    name = result.step.removeprefix(TRAIN)
    yield NamedModel(name, digest, folder, result, (_root(result),))


def _inputs(result: FoundResult) -> Iterator[NamedModel]:
    """Models that a step was made from: given ones, and trainings of other flows."""
    from pipelines.runtime.storage import input_of

    for step, relative in (result.manifest.input_folders if result.manifest else {}).items():
        if not step.startswith((TRAIN, GIVEN)):
            continue
        name = step.partition(".")[2]
        place = input_of(result.files, relative)
        folder = within(place, "model") if step.startswith(TRAIN) else place
        try:
            digest = str(_header(folder)["digest"])
        except (CasemateError, OSError):
            continue  # gone, or elsewhere: its results are still those of its digest
        made = _training_at(place) if step.startswith(TRAIN) else None
        yield NamedModel(name, digest, folder, made, (_root(result),))


def _training_at(place: Folder) -> FoundResult | None:
    found = results_at(place.resolve() if isinstance(place, Path) else str(place))
    return found[0] if found else None


def _root(result: FoundResult) -> str:
    """The storage of a step."""
    return result.place.rstrip("/").rsplit("/", 2)[0]


# -- MLflow


def _registered(place: str, storage: str | Path | None, tracking: str | None) -> list[NamedModel]:
    from pipelines.runtime.registered_models import version_at

    version = version_at(place, store_of(place, storage=storage, tracking=tracking, key=KEY))
    if not version.run_id:
        raise CasemateError(KEY, place, "was not logged by a run of ours; name its model folder")
    found = _of_run(version.run_id, place, storage, tracking)
    return [replace(model, version=version) for model in found]


def _of_run(
    run_id: str, place: str, storage: str | Path | None, tracking: str | None
) -> list[NamedModel]:
    results = results_of_run(run_id, storage=storage, tracking=tracking, key=KEY)
    found = _of_steps(results, place)
    if [result.stage for result in results] == ["certify"]:  # a smoothed classifier
        import json

        document = json.loads((results[0].files / "certificate.json").read_text())
        digest = document["evidence"]["model_digest"]
        found = [model for model in found if model.digest == digest]
    return found


def dataset_of(model: NamedModel, results: Sequence[FoundResult]) -> Folder | None:
    """The prepared dataset of the training, else of a result, where it is still there."""
    from pipelines.runtime.storage import input_of

    sources = [*([model.training] if model.training else []), *results]
    for result in sources:
        folders = result.manifest.input_folders if result.manifest else {}
        if "prepare" in folders:
            place = input_of(result.files, folders["prepare"])
            try:
                if (place / "dataset.json").is_file():
                    return place
            except (CasemateError, OSError):
                continue
    return None


def names_of(model: NamedModel, result: FoundResult) -> tuple[str, ...]:
    """The names of a model in a result."""
    return tuple(name for name, digest in models_of(result).items() if digest == model.digest)
