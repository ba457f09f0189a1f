"""What a running step works with: where it writes, what it reads, and how it is finished."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote
from uuid import uuid4

from components.core import files
from components.core.errors import CasemateError
from components.core.folders import Folder, is_below
from pipelines.runtime.manifests import Manifest, read_manifest
from pipelines.runtime.notes import Notes
from pipelines.runtime.parts import PartStore
from pipelines.runtime.provenance import Provenance, execution, git_revision, software
from pipelines.runtime.storage import SCRATCH, StepPlace, Storage
from pipelines.runtime.store import Ref
from pipelines.runtime.stored_folder import StoredFolder, link_or_copy

if TYPE_CHECKING:  # workers import this module: spare them mlflow
    from pipelines.runtime.step_run import StepRun


def manifest_of(folder: Folder) -> Manifest | None:
    """The manifest of a step that is read; None for a folder that no flow has made."""
    if isinstance(folder, StoredFolder):
        return folder.manifest
    return read_manifest(folder / ".")


@dataclass(frozen=True)
class StageDir:
    """Where one step writes; `inputs` are the finished folders it reads."""

    path: Path  # on this machine
    step: str
    fingerprint: str
    run: "StepRun"
    inputs: Mapping[str, Folder] = field(default_factory=dict)
    at: StepPlace | None = None  # None: the place of `path` in the folder two levels above
    stored: dict[str, Ref] = field(default_factory=dict)  # files that workers have stored
    began: float = field(default_factory=time.time)

    @cached_property
    def place(self) -> StepPlace:
        """The step's place in the storage."""
        path = self.path.absolute()
        return self.at or Storage.at(path.parents[1]).step(path.parent.name, path.name)

    @property
    def part(self) -> str:
        """The part of the name after the stage: `standard` of `train.standard`."""
        return self.step.partition(".")[2]

    @property
    def scratch(self) -> Path:
        """A folder for what only a resumed step needs; removed when the step is finished."""
        folder = self.place.path / SCRATCH
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @property
    def ray_storage(self) -> str:
        """Where Ray keeps the checkpoints of the step."""
        if self.place.storage.is_local:
            return str(self.scratch)
        # pyarrow refuses spaces and umlauts in a URI; obstore reads both forms alike.
        return quote(unquote(f"{self.place}/{SCRATCH}"), safe=":/")

    @property
    def notes(self) -> Notes:
        """What workers show while the step runs."""
        token = uuid4().hex[:12]  # an earlier start may have had other notes
        is_local = self.place.storage.is_local
        return Notes(self.scratch, None if is_local else f"{self.place.name}-{token}")

    def fetch(self, stored: Mapping[str, Ref]) -> None:
        """Bring files that a worker has stored to `path`; they are published with the step."""
        if odd := [name for name in stored if not is_below(name)]:
            raise CasemateError("storage", self.place, f"names a file outside of it: {odd[0]}")
        self.stored.update(stored)
        for name, ref in stored.items():
            target = self.path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with files.atomic(target, sync=False) as temporary:
                link_or_copy(self.place.store.local(ref), temporary)

    def parts(self, what: str, *, run_id: str) -> PartStore:
        """Results of units of this step, kept until it is finished; `run_id` is their identity."""
        return PartStore(self.place.store, f"{self.place.key}/{SCRATCH}/{what}", run_id=run_id)

    def trained_in(self, model: str) -> str | None:
        """The MLflow run that trained a model which this step reads; None for a given one."""
        folder = self.inputs.get(f"train.{model}")
        manifest = manifest_of(folder) if folder else None
        return manifest.mlflow_run_id if manifest else None

    def write_bytes(self, name: str, content: bytes) -> Path:
        """Write a file atomically; `name` may begin with folders."""
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        return files.write_atomic(target, content)

    def write_text(self, name: str, text: str) -> Path:
        return self.write_bytes(name, text.encode())

    def write_json(self, name: str, value: object) -> Path:
        return self.write_text(name, files.json_text(value))

    def provenance(self) -> Provenance:
        """Code revision, software versions, MLflow run, and contents of the inputs."""
        manifests = {name: manifest_of(path) for name, path in sorted(self.inputs.items())}
        return {
            "git_revision": git_revision(),
            "software": software(),
            "fingerprint": self.fingerprint,
            "mlflow_run_id": self.run.run_id,
            "inputs": {name: m.as_input() for name, m in manifests.items() if m},
        }

    def page_of_run(self, run_id: str) -> str | None:
        """The address of a run on the MLflow server; None where no server answers."""
        return self.run.page_of(run_id)

    def finish(self, *, fence: int = 0) -> None:
        """Finish the step: publish its files with the manifest, then remove scratch files."""
        folders = {name: self._relative(path) for name, path in sorted(self.inputs.items())}
        facts = {
            "step": self.step,
            "input_folders": folders,
            "execution": execution(self.began),
            **self.provenance(),
        }
        self.place.publish(facts, stored=self.stored, fence=fence)
        self.place.clear_scratch()

    def _relative(self, folder: Folder) -> str:
        """Relative to the step's own folder: the storage may move."""
        if isinstance(folder, StoredFolder):
            return os.path.relpath(folder.key, self.place.key)
        if self.place.storage.is_local:
            return os.path.relpath(str(folder), self.place.path)
        return str(Path(str(folder)).absolute())
