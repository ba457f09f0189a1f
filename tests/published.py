"""What the steps of a storage have published, in a form that two runs of one flow share."""

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

from pipelines.runtime.storage import Storage

TIMED = re.compile(r"seconds|per_second|mlflow_run_id|git_revision")
SHOWS_TIMES = {"report.html"}  # its tables are compared as CSV


def published(storage: Storage, *, without: str = "") -> dict[str, str]:
    """Published files by step and name: digests, or documents without times and run ids.

    `without` is a further key that is left out of documents.
    """
    found: dict[str, str] = {}
    keys = [entry.key for entry in storage.store.listing("")]
    steps = {tuple(key.split("/")[:2]) for key in keys if key.endswith(".manifest.json")}
    for recipe, step in sorted(steps):
        opened = storage.step(recipe, step).open()
        for file, ref in opened.files.items():
            if file not in SHOWS_TIMES:
                found[f"{recipe}/{step}/{file}"] = _content(opened / file, without) or ref.sha256
    return found


def _content(path: Path, without: str) -> str | None:
    if path.suffix == ".json":
        return json.dumps(_reduced(json.loads(path.read_text()), without), sort_keys=True)
    if path.suffix == ".csv":
        rows = csv.DictReader(io.StringIO(path.read_text()))
        return json.dumps([_reduced(row, without) for row in rows])
    return None


def _reduced(value: Any, without: str) -> Any:
    """A document without what differs from run to run."""
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if k != without and not TIMED.search(k)}
        return {k: _reduced(v, without) for k, v in kept.items()}
    return [_reduced(one, without) for one in value] if isinstance(value, list) else value
