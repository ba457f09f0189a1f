"""Steps of a storage made by hand: as flows write them, without a flow."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

from components.core.files import write_atomic
from components.core.folders import Folder
from pipelines.runtime.artifacts import StageDir
from pipelines.runtime.step_locks import hold
from pipelines.runtime.storage import SCRATCH, StepPlace, Storage

PRINT = "0123456789ab" + 52 * "f"
DAY = 24 * 3600.0


def place_of(storage: Storage, recipe: str, step: str) -> StepPlace:
    return storage.step(recipe, f"{step}-{PRINT[:12]}")


def stage_of(place: StepPlace, inputs: Mapping[str, Folder] | None = None) -> StageDir:
    place.work.mkdir(parents=True, exist_ok=True)
    step, run = place.name.rpartition("-")[0], SimpleNamespace(run_id="mlflow-1")
    return StageDir(place.work, step, PRINT, run, inputs or {}, place)


def finish(place: StepPlace, files: Mapping[str, bytes], **inputs: Folder) -> None:
    """Finish a step under its lock."""
    with hold(place.store, [place.key]):
        write_and_publish(place, files, **inputs)


def write_and_publish(place: StepPlace, files: Mapping[str, bytes], **inputs: Folder) -> None:
    stage = stage_of(place, inputs)
    for name, content in files.items():
        stage.write_bytes(name, content)
    stage.finish()


def begin(place: StepPlace, files: Mapping[str, bytes], *, stored: bool = False) -> None:
    """A step that was killed: a part, files, and perhaps these in the store without manifest.

    A finished step is not begun again: what a late driver leaves is in the store alone.
    """
    with hold(place.store, [place.key]), TemporaryDirectory() as elsewhere:
        is_late = place.manifest() is not None
        place.store.put_new(f"{place.key}/{SCRATCH}/votes/{time.time_ns()}", b"part")
        for name, content in files.items():
            path = (Path(elsewhere) if is_late else place.work) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, content, sync=False)
            if stored:
                place.put_file(name, path)


def force(place: StepPlace) -> None:
    with hold(place.store, [place.key]):
        place.renew("test")


def make_older(folder: Path, seconds: float) -> None:
    """Let all files below a folder look as if they had been written earlier."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in {path.stat().st_ino: path for path in files}.values():
        when = path.stat().st_mtime - seconds
        os.utime(path, (when, when))
