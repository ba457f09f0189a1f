"""Reads the finished folders of a run into plain values, the only input of the report."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from components.certify.certificate import CertificateDocument
from components.core.documents import parse_json
from components.core.errors import CasemateError
from components.core.folders import Folder
from components.core.object_stores import is_uri
from components.core.types import Json
from components.report.content import Accuracy
from components.report.records import (
    AddedStep,
    AttackedModel,
    AttackResult,
    AttackStep,
    CertifyResult,
    Challenge,
    Examples,
    ItemOutcomes,
    TrainResult,
    TunedTrial,
    TuneResult,
)

RUN_AGAIN = "; run this step again"  # how to mend a folder


def read_json(path: Path, *, step: str) -> Json:
    """Read a JSON object; errors name the step."""
    try:
        value = parse_json(path.read_bytes())
    except FileNotFoundError as error:
        raise CasemateError(step, path, f"is missing{RUN_AGAIN}") from error
    except ValueError as error:
        raise CasemateError(step, path, f"is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CasemateError(step, path, f"is not a JSON object{RUN_AGAIN}")
    return value


def read_train(step: str, folder: Folder) -> TrainResult:
    """`train.<model>`: history and identity."""
    header = read_json(folder / "model" / "model.json", step=step)
    history = read_json(folder / "history.json", step=step)
    _need(header, ("digest", "spec"), path=folder / "model" / "model.json", step=step)
    _need(history, ("rows",), path=folder / "history.json", step=step)
    model = step.removeprefix("train.")
    rows = tuple(history["rows"])
    weights = _num_weights(folder, "model/model.safetensors")
    return TrainResult(model, rows, str(header["digest"]), header["spec"], weights)


def read_tune(step: str, folder: Folder) -> TuneResult:
    """`tune`: the ranked trials, and `additive.json` where the recipe lists changes."""
    path = folder / "trials.json"
    document = read_json(path, step=step)
    _need(document, ("metric", "scheduler", "attack", "space", "rows"), path=path, step=step)
    metric, steps = str(document["metric"]), []
    if (added := folder / "additive.json").exists():
        rows = read_json(added, step=step)
        _need(rows, ("rows",), path=added, step=step)
        steps = [_added_step(row, metric, path=added, step=step) for row in rows["rows"]]
    return TuneResult(
        metric,
        str(document["scheduler"]),
        document["attack"],
        document["space"],
        tuple(_tuned_trial(row, metric, path=path, step=step) for row in document["rows"]),
        document.get("chance"),
        tuple(steps),
    )


def _tuned_trial(row: Json, metric: str, *, path: Path, step: str) -> TunedTrial:
    keys = ("trial", "values", metric, "val_accuracy", "epochs", "status", "tied_with_best")
    _need(row, keys, path=path, step=step)
    return TunedTrial(
        int(row["trial"]),
        row.get("name"),
        row["values"],
        _share(row[metric], where=f"{step} {metric}"),
        _share(row["val_accuracy"], where=f"{step} val_accuracy"),
        int(row["epochs"]),
        str(row["status"]),
        bool(row["tied_with_best"]),
    )


def _added_step(row: Json, metric: str, *, path: Path, step: str) -> AddedStep:
    _need(row, ("name", "set", metric, "val_accuracy", "difference"), path=path, step=step)
    found = row["difference"]
    return AddedStep(
        str(row["name"]),
        row["set"],
        _share(row[metric], where=f"{step} {metric}"),
        _share(row["val_accuracy"], where=f"{step} val_accuracy"),
        (float(found["value"]), float(found["low"]), float(found["high"])) if found else None,
    )


def _share(raw: Json | None, *, where: str) -> Accuracy | None:
    return None if raw is None else Accuracy.stored(raw, where=where)


def read_model(step: str, folder: Folder) -> TrainResult:
    """`model.<name>`: a model that was not trained here and has no history."""
    header = read_json(folder / "model.json", step=step)
    _need(header, ("digest", "spec"), path=folder / "model.json", step=step)
    model, weights = step.removeprefix("model."), _num_weights(folder, "model.safetensors")
    return TrainResult(model, (), str(header["digest"]), header["spec"], weights)


def _num_weights(folder: Folder, name: str) -> int | None:
    """Elements of all tensors of a weights file, from its header alone."""
    if is_uri(str(folder)) or not (path := folder / name).exists():
        return None
    with path.open("rb") as file:
        header = parse_json(file.read(int.from_bytes(file.read(8), "little")))
    shapes = [entry["shape"] for key, entry in header.items() if key != "__metadata__"]
    return sum(int(math.prod(shape)) for shape in shapes)


def read_attack(step: str, folder: Folder) -> AttackResult:
    """`attack.<name>`: accuracies, curves, sanity checks and examples of every attacked model."""
    path = folder / "summary.json"
    summary = read_json(path, step=step)
    _need(summary, ("threat", "settings", "models"), path=path, step=step)
    kept = list(summary["models"])
    examples, broken = _read_examples(folder / "examples.npz", models=kept, step=step)
    items = _read_outcomes(folder / "attacks.parquet", step=step)
    models = {
        model: replace(
            _attacked_model(entry, examples[model], path=path, step=f"{step} {model}"),
            broken=broken.get(model),
            items=items.get(model),
        )
        for model, entry in summary["models"].items()
    }
    return AttackResult(step, summary["threat"], models, summary["settings"])


def _attacked_model(summary: Json, examples: Examples, *, path: Path, step: str) -> AttackedModel:
    keys = ("clean_accuracy", "robust_accuracy", "attacks", "num_evaluations", "zero_gradient_rate")
    _need(summary, keys, path=path, step=step)
    curves = {
        key: tuple((float(p[key]), Accuracy.stored(p["accuracy"], where=step)) for p in points)
        for key, points in summary.get("curves", {}).items()
    }
    return AttackedModel(
        Accuracy.stored(summary["clean_accuracy"], where=f"{step} clean_accuracy"),
        Accuracy.stored(summary["robust_accuracy"], where=f"{step} robust_accuracy"),
        int(summary["num_evaluations"]),
        float(summary["zero_gradient_rate"]),
        tuple(_attack_step(entry, path=path, step=step) for entry in summary["attacks"]),
        curves,
        summary.get("sanity"),
        summary.get("paper_protocol", {}),
        examples,
    )


def _attack_step(entry: Json, *, path: Path, step: str) -> AttackStep:
    keys = ("name", "entry", "num_items", "num_broken", "robust_accuracy", "num_evaluations")
    _need(entry, (*keys, "num_gradients", "zero_gradient_rate"), path=path, step=step)
    return AttackStep(
        str(entry["name"]),
        str(entry["entry"]),
        int(entry["num_items"]),
        int(entry["num_broken"]),
        Accuracy.stored(entry["robust_accuracy"], where=f"{step} {entry['name']}"),
        int(entry["num_evaluations"]),
        int(entry["num_gradients"]),
        float(entry["zero_gradient_rate"]),
    )


def read_certify(step: str, folder: Folder) -> CertifyResult:
    """`certify.<name>`: the claims; `challenge.json` exists only with `challenge` in the recipe."""
    path = folder / "certificate.json"
    raw = read_json(path, step=step)
    keys = ("kind", "threat", "claim", "evidence", "votes_sha256", "sound", "summary")
    _need(raw, (*keys, "certificates_sha256"), path=path, step=step)
    try:
        document = CertificateDocument.from_dict(raw)
    except ValueError as error:
        raise CasemateError(step, path, f"{error}{RUN_AGAIN}") from error
    columns = _read_table(folder / "certificates.parquet", step=step).to_pydict()
    if not columns["item_id"]:
        raise CasemateError(step, folder, "certifies no item; raise num_items")
    challenge = None
    if (path := folder / "challenge.json").exists():
        raw = read_json(path, step=step)
        needed = ("attack", "threat", "certified", "standing", "broken_certified")
        _need(raw, needed, path=path, step=step)
        challenge = Challenge(
            str(raw["attack"]),
            raw["threat"],
            Accuracy.stored(raw["certified"], where=f"{step} certified"),
            Accuracy.stored(raw["standing"], where=f"{step} standing"),
            int(raw["broken_certified"]),
        )
    return CertifyResult(step, folder, document, columns, challenge)


def read_item_votes(result: CertifyResult, item_ids: list[str]) -> dict[str, list[int]]:
    """All predictions on each item, in the order of votes."""
    table = _read_table(result.folder / "votes.parquet", step=result.name)
    rows = [row for row in table.to_pylist() if row["item_id"] in item_ids]
    votes: dict[str, list[int]] = {}
    for row in sorted(rows, key=lambda row: (row["item_id"], row["start"])):
        votes.setdefault(row["item_id"], []).extend(row["predictions"])
    return votes


def _read_table(path: Path, *, step: str) -> Any:
    try:
        return pq.read_table(path)
    except FileNotFoundError as error:
        raise CasemateError(step, path, f"is missing{RUN_AGAIN}") from error
    except pa.ArrowInvalid as error:
        raise CasemateError(step, path, f"is not a readable Parquet file: {error}") from error


def _read_outcomes(path: Path, *, step: str) -> dict[str, ItemOutcomes]:
    """Predictions per item by model; {}: a folder without them."""
    if not path.exists():
        return {}
    columns = _read_table(path, step=step).to_pydict()
    names = np.asarray(columns["model"])
    found = {}
    for model in dict.fromkeys(columns["model"]):
        rows = np.flatnonzero(names == model)
        label, clean, attacked = (
            np.asarray(columns[key], dtype=np.int64)[rows]
            for key in ("label", "clean_prediction", "adversarial_prediction")
        )
        broken_by = tuple(columns["broken_by"][row] for row in rows)
        found[model] = ItemOutcomes(label, clean, attacked, broken_by)
    return found


def _read_examples(
    path: Path, *, models: list[str], step: str
) -> tuple[dict[str, Examples], dict[str, Examples]]:
    """Examples of the first items and of the first broken ones, by model."""
    parts = ("clean", "adversarial", "label", "clean_prediction", "adversarial_prediction")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            first = {m: Examples(*(arrays[f"{m}/{part}"] for part in parts)) for m in models}
            broken = {
                m: Examples(*(arrays[f"{m}/broken/{part}"] for part in parts))
                for m in models
                if f"{m}/broken/clean" in arrays
            }
            return first, broken
    except FileNotFoundError as error:
        raise CasemateError(step, path, f"is missing{RUN_AGAIN}") from error
    except (KeyError, ValueError, OSError, BadZipFile) as error:
        raise CasemateError(step, path, f"cannot be read: {error}") from error


def _need(value: Json, keys: tuple[str, ...], *, path: Path, step: str) -> None:
    missing = [key for key in keys if key not in value]
    if missing:
        raise CasemateError(step, path, f"lacks {', '.join(missing)}{RUN_AGAIN}")
