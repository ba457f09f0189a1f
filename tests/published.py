"""What the steps of a storage have published, in a form that two runs of one flow share."""

import json
import re
from typing import Any

from pipelines.runtime.storage import Storage

TIMED = re.compile(r"seconds|per_second|_at$|mlflow_run_id|git_revision")


def published(storage: Storage, recipe: str | None = None) -> dict[str, str]:
    """Digests of all published files by step and name; JSON without times and run ids."""
    found: dict[str, str] = {}
    keys = [entry.key for entry in storage.store.listing(recipe or "")]
    steps = {tuple(key.split("/")[:2]) for key in keys if key.endswith(".manifest.json")}
    for name, step in sorted(steps):
        manifest = storage.step(name, step).manifest()
        opened = storage.step(name, step).open()
        for file, entry in manifest.files.items():
            found[f"{name}/{step}/{file}"] = entry["sha256"]
            if file.endswith(".json"):
                document = json.loads((opened / file).read_text())
                found[f"{name}/{step}/{file}"] = json.dumps(untimed(document), sort_keys=True)
    return found


def untimed(value: Any) -> Any:
    """A document without what differs from run to run."""
    if isinstance(value, dict):
        return {k: untimed(v) for k, v in value.items() if not TIMED.search(k)}
    return [untimed(one) for one in value] if isinstance(value, list) else value
