"""What a user names to compare: runs, steps, models, certificates and runs of MLflow."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from components.core.errors import CasemateError, first_line
from components.core.folders import folder_at, within
from components.core.object_stores import is_uri
from pipelines.api.found_results import FoundResult, results_at
from pipelines.api.item_verdicts import is_about

KEY = "compare"  # in errors
RUN_ID = re.compile(r"(?:mlflow:)?([0-9a-f]{32})")
LABELLED = re.compile(r"([^=/\\:]+)=(.+)", re.DOTALL)
FINGERPRINT = re.compile(r"-[0-9a-f]{12}$")


@dataclass(frozen=True)
class Contender:
    """Results under one label; with a digest, of this model only."""

    label: str
    results: Sequence[FoundResult]
    digest: str = ""


Named = Sequence[str | Path] | Mapping[str, str | Path]


def contenders(
    named: Named, *, storage: str | Path | None = None, tracking: str | None = None
) -> list[Contender]:
    """The results behind every argument: LABEL=PLACE or PLACE, or places by label."""
    if isinstance(named, str | Path):
        raise CasemateError(KEY, named, "is one place; give a list")
    pairs = list(named.items()) if isinstance(named, Mapping) else [_split(p) for p in named]
    if not pairs:
        raise CasemateError(KEY, "", "needs runs, steps, models or certificates")
    labels = _labels(pairs)
    return [
        _contender(label, str(place), storage=storage, tracking=tracking)
        for label, (_, place) in zip(labels, pairs, strict=True)
    ]


def _split(given: str | Path) -> tuple[str, str | Path]:
    found = LABELLED.fullmatch(str(given))
    if found is None or Path(given).exists():
        return "", given
    return found[1], found[2]


def _labels(pairs: Sequence[tuple[str, str | Path]]) -> list[str]:
    """A label of its own for every argument: as short a part of its place as tells it apart."""
    if len(set(pairs)) < len(pairs):
        twice = next(pair for pair in pairs if pairs.count(pair) > 1)
        raise CasemateError(KEY, twice[1], "is named twice")
    found = []
    for label, place in pairs:
        others = [str(p) for given, p in pairs if not given and str(p) != str(place)]
        found.append(label or _short(str(place), others))
    for label in found:
        if found.count(label) > 1:
            raise CasemateError(KEY, label, "is the label of two; write LABEL=PLACE")
    return found


def _short(place: str, others: Sequence[str]) -> str:
    for count in range(9):
        ending = _ending(place, count)
        if all(_ending(other, count) != ending for other in others):
            return ending
    return place


def _ending(place: str, count: int) -> str:
    """The last parts of a place; 0: the last one without its fingerprint."""
    if run := RUN_ID.fullmatch(place):
        return f"run {run[1][: 8 * max(1, count)]}"
    parts = [part for part in re.split(r"[/\\]", place) if part not in ("", ".")] or [place]
    return "/".join(parts[-count:]) if count else FINGERPRINT.sub("", parts[-1])


def _contender(
    label: str, place: str, *, storage: str | Path | None, tracking: str | None
) -> Contender:
    if run := RUN_ID.fullmatch(place):
        return Contender(label, results_of_run(run[1], storage=storage, tracking=tracking))
    if place.startswith("mlflow:"):
        raise CasemateError(KEY, place, "is not a run of MLflow; write mlflow: and 32 hex digits")
    digest, folder = model_at(place)
    if digest:
        return Contender(label, _of_model(place, folder, digest, storage), digest)
    if not is_uri(place) and not Path(place).expanduser().exists():
        raise CasemateError(KEY, place, "does not exist")
    return Contender(label, results_at(place))


# -- models


def model_at(place: str) -> tuple[str, str]:
    """The digest of a model folder or of a step that trained one, and the folder of its step."""
    from components.models.checkpoint import read_header
    from pipelines.runtime.storage import STEP_URI

    if is_uri(place):
        step = STEP_URI.fullmatch(place.rstrip("/"))
        if step is None or not (step[4] == "model" or step[3].startswith("train.")):
            return "", ""
        folder = folder_at(place) if step[4] else within(folder_at(place), "model")
        return str(read_header(folder)["digest"]), step[1]
    path = Path(place).expanduser()
    for inner in (path, path / "model"):
        if (inner / "model.json").is_file():
            return str(read_header(inner)["digest"]), str(inner.resolve())
    return "", ""


def _of_model(
    place: str, folder: str, digest: str, storage: str | Path | None
) -> list[FoundResult]:
    """All results of a storage; those of the model are chosen by its digest."""
    from pipelines.api.storages import default_storage
    from pipelines.runtime.manifests import MANIFEST

    root = storage
    if root is None and is_uri(place):
        root = folder
    elif root is None:
        step = Path(folder).parent  # STORAGE/FLOW/train.NAME-FINGERPRINT/model
        trained = (step / MANIFEST).is_file() and FINGERPRINT.search(step.name)
        root = step.parent.parent if trained else Path(default_storage())
        if not root.is_dir():
            remedy = (
                "is a model without results; name their storage with --storage, or run casemate"
            )
            raise CasemateError(KEY, place, f"{remedy} attack --model {place} --data DIR")
    found = [result for result in results_at(root) if is_about(result, digest)]
    if not found:
        remedy = f"has no finished attack, evaluation or certificate in {root}; name another"
        raise CasemateError(KEY, place, f"{remedy} --storage, or run casemate attack --model on it")
    return found


# -- runs of MLflow


def store_of(named: str, *, storage: str | Path | None, tracking: str | None, key: str) -> str:
    """The URI of the MLflow store in which a run or a model is named."""
    from pipelines.api.storages import default_storage
    from pipelines.runtime.tracking_uri import URI_ENV

    if uri := tracking or os.environ.get(URI_ENV):
        return uri
    database = Path(storage or default_storage()).absolute() / "mlflow.db"
    if is_uri(str(storage or "")) or not database.is_file():
        raise CasemateError(key, named, "is of MLflow; name its store with --tracking")
    return f"sqlite:///{database}"


def results_of_run(
    run_id: str, *, storage: str | Path | None, tracking: str | None, key: str = KEY
) -> list[FoundResult]:
    """The steps of a run: its own, or those of a flow's run."""
    from pipelines.runtime.tracked_steps import steps_of_run

    steps = steps_of_run(run_id, store_of(run_id, storage=storage, tracking=tracking, key=key))
    found = []
    for step in steps:
        root = str(storage) if storage is not None else step.storage
        if not root:
            remedy = "is in a storage that its run does not tell; name it with --storage"
            raise CasemateError(key, run_id, remedy)
        place = f"{root.rstrip('/')}/{step.flow}/{step.folder}"
        try:
            own = results_at(place)
        except (CasemateError, OSError) as error:
            remedy = f"ran in {place}, which cannot be read ({first_line(error)})"
            raise CasemateError(key, run_id, f"{remedy}; --storage names another place") from error
        if any(r.manifest and r.manifest.mlflow_run_id != step.run_id for r in own):
            remedy = f"is not the run of {place}, which was run again since; name the folder"
            raise CasemateError(key, run_id, remedy)
        found += own
    return found
