"""Two storages beside each other: folders, files, what is in them, and what MLflow was told."""

import json
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.golden.documents import (
    VERSION_KEYS,
    digest,
    file_digest,
    key_paths,
    read_json,
    table_digest,
    without,
)

# How long something took: never the same twice.
TIMES = frozenset({"seconds", "wait_seconds", "images_per_second", "attack_seconds"})
TRACKED = {
    "metrics": "SELECT r.name, m.key, m.step, m.value FROM metrics m JOIN runs r USING (run_uuid)",
    "parameters": "SELECT r.name, p.key, p.value FROM params p JOIN runs r USING (run_uuid)",
    "registered models": "SELECT name, version FROM model_versions",
}


@dataclass(frozen=True)
class Difference:
    """Something that was compared; `how` says what differs, None where nothing does."""

    place: str
    what: str
    how: str | None


def compare_storages(old: Path, new: Path) -> list[Difference]:
    """Everything that two runs of the same recipes should agree on."""
    rows = []
    folders = {path.parent.relative_to(old).as_posix() for path in old.glob("*/*/manifest.json")}
    others = {path.parent.relative_to(new).as_posix() for path in new.glob("*/*/manifest.json")}
    for folder in sorted(folders | others):
        if folder in folders and folder in others:
            rows.append(Difference(folder, "folder name", None))
            rows += _compare_folders(folder, old / folder, new / folder)
        else:
            where = "OLD" if folder in folders else "NEW"
            rows.append(Difference(folder, "folder name", f"is in {where} alone"))
    return [*rows, *_compare_tracking(old / "mlflow.db", new / "mlflow.db")]


def _compare_folders(place: str, old: Path, new: Path) -> Iterator[Difference]:
    names = {p.relative_to(old).as_posix() for p in old.rglob("*") if p.is_file()}
    others = {p.relative_to(new).as_posix() for p in new.rglob("*") if p.is_file()}
    for name in sorted(names | others):
        if name in names and name in others:
            yield Difference(place, name, difference(old / name, new / name))
        else:
            yield Difference(place, name, f"is in {'OLD' if name in names else 'NEW'} alone")


def difference(old: Path, new: Path) -> str | None:
    """What differs between two files of one name; None where they hold the same."""
    if old.suffix == ".json":
        return _compare_documents(read_json(old), read_json(new))
    if old.suffix == ".npz":
        return _compare_arrays(old, new)
    if file_digest(old) == file_digest(new):
        return None
    if old.suffix == ".parquet" and table_digest(old) == table_digest(new):
        return "other bytes, equal tables"
    return "other bytes"


def _compare_documents(old: Any, new: Any) -> str | None:
    if changed := set(key_paths(old)) ^ set(key_paths(new)):
        return f"other keys: {sorted(changed)[:5]}"
    left, right = (_lasting(document) for document in (old, new))
    if digest(left) == digest(right):
        return None
    return f"other values: {next(_places(left, right, ''))}"


def _lasting(document: Any) -> Any:
    """What of a JSON document neither versions nor time decide."""
    if isinstance(document, Mapping) and {"step", "files", "inputs"} <= document.keys():
        names = sorted(document["files"])  # a manifest: digests of files that hold times
        document = {k: v for k, v in document.items() if k not in ("files", "inputs")}
        document = {**document, "files": names}
    return without(document, VERSION_KEYS | TIMES)


def _places(old: Any, new: Any, above: str) -> Iterator[str]:
    """Where two JSON values differ, and how."""
    if isinstance(old, Mapping) and isinstance(new, Mapping) and old.keys() == new.keys():
        for key in old:
            yield from _places(old[key], new[key], f"{above}/{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, (left, right) in enumerate(zip(old, new, strict=True)):
            yield from _places(left, right, f"{above}/{number}")
    elif json.dumps(old) != json.dumps(new):
        yield f"{above} was {old!r:.60}, is {new!r:.60}"


def _compare_arrays(old: Path, new: Path) -> str | None:
    with np.load(old) as left, np.load(new) as right:
        if sorted(left) != sorted(right):
            return f"other arrays: {sorted(set(left) ^ set(right))}"
        for name in left:
            a, b = left[name], right[name]
            if (a.dtype, a.shape, a.tobytes()) != (b.dtype, b.shape, b.tobytes()):
                return f"other values in {name}"
    return None


def _compare_tracking(old: Path, new: Path) -> Iterator[Difference]:
    """What MLflow was told, without times."""
    for what, query in TRACKED.items():
        left, right = (_told(path, query) for path in (old, new))
        changed = sorted(left ^ right)
        how = f"{len(changed)} rows, e.g. {changed[0]}" if changed else None
        yield Difference("mlflow.db", f"{len(left)} {what}", how)


def _told(path: Path, query: str) -> set[str]:
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
        rows = database.execute(query).fetchall()
    return {json.dumps(row) for row in rows if not _is_time(str(row[1]))}


def _is_time(key: str) -> bool:
    return key.rpartition("/")[2] in TIMES or key.startswith("system/")
