"""Two storages beside each other: folders, files, what is in them, and what MLflow was told."""

import csv
import json
import re
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
from tests.steps import files_of

# How long something took: never the same twice.
TIMES = frozenset(
    {"seconds", "started", "machine", "wait_seconds", "images_per_second", "attack_seconds"}
)
TRACKED = {
    "metrics": "SELECT r.name, m.key, m.step, m.value FROM metrics m JOIN runs r USING (run_uuid)",
    "parameters": "SELECT r.name, p.key, p.value FROM params p JOIN runs r USING (run_uuid)",
    "tags": "SELECT r.name, t.key, t.value FROM tags t JOIN runs r USING (run_uuid) "
    "WHERE t.key NOT LIKE 'mlflow.%'",
    "registered models": "SELECT name, alias, version FROM registered_model_aliases",
    "datasets": "SELECT name, digest FROM datasets",
}

# Of a page: commits and runs, digests of inputs that hold times, tables that are files too.
PASSING = re.compile(
    r'\b[0-9a-f]{40}(-dirty)?\b|\b[0-9a-f]{32}\b|content [0-9a-f]{64}|href="data:text/csv[^"]*"'
    r'|<td class="num"[^>]*>(<span>)?[^<]*(</span>)?</td>'
)
FIGURE = re.compile(r"<svg.*?</svg>|data:image/[^\"]*", re.DOTALL)


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
    return [*rows, *_compare_tracking(old, new)]


def _compare_folders(place: str, old: Path, new: Path) -> Iterator[Difference]:
    names, others = files_of(old).keys(), files_of(new).keys()
    for name in sorted(names | others):
        if name in names and name in others and name.endswith(".html"):
            yield from _compare_pages(place, old / name, new / name)
        elif name in names and name in others:
            yield Difference(place, name, difference(old / name, new / name))
        else:
            yield Difference(place, name, f"is in {'OLD' if name in names else 'NEW'} alone")


def difference(old: Path, new: Path) -> str | None:
    """What differs between two files of one name; None where they hold the same."""
    if old.suffix == ".json":
        return _compare_documents(read_json(old), read_json(new))
    if old.suffix == ".npz":
        return _compare_arrays(old, new)
    if old.suffix == ".csv":
        return None if _lasting_columns(old) == _lasting_columns(new) else "other rows"
    if file_digest(old) == file_digest(new):
        return None
    if old.suffix == ".parquet" and table_digest(old) == table_digest(new):
        return "other bytes, equal tables"
    return "other bytes"


def _lasting_columns(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return [{k: v for k, v in row.items() if k not in TIMES} for row in csv.DictReader(file)]


def _compare_pages(place: str, old: Path, new: Path) -> Iterator[Difference]:
    """Words and figures of a report; its tables are files beside it."""
    pages = [p.read_text().replace(str(p.parents[2]), "STORAGE") for p in (old, new)]
    figures, words = zip(*((FIGURE.findall(p), FIGURE.sub("", p)) for p in pages), strict=True)
    changed = sum(a != b for a, b in zip(*figures, strict=False))
    if len(figures[0]) != len(figures[1]):
        said: str | None = f"{len(figures[0])} figures were there, {len(figures[1])} are"
    else:
        said = f"{changed} of {len(figures[0])} figures differ" if changed else None
    yield Difference(place, f"figures of {old.name}", said)
    left, right = (PASSING.sub("", text).splitlines() for text in words)
    lines = [f"{a.strip()!r:.60} became {b.strip()!r:.60}"
             for a, b in zip(left, right, strict=False) if a != b]  # fmt: skip
    if left != right and not lines:
        lines = [f"{len(left)} lines became {len(right)}"]
    yield Difference(place, f"words of {old.name}", lines[0] if lines else None)


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
        left, right = (_told(storage, query) for storage in (old, new))
        changed = sorted(left ^ right)
        how = f"{len(changed)} rows, e.g. {changed[0]}" if changed else None
        yield Difference("mlflow.db", f"{len(left)} {what}", how)


def _told(storage: Path, query: str) -> set[str]:
    with sqlite3.connect(f"file:{storage / 'mlflow.db'}?mode=ro", uri=True) as database:
        rows = database.execute(query).fetchall()
    told = (json.dumps(row) for row in rows if not _is_time(str(row[1])))
    return {text.replace(str(storage), "STORAGE") for text in told}


def _is_time(key: str) -> bool:
    return key.rpartition("/")[2] in TIMES or key.startswith("system/")
