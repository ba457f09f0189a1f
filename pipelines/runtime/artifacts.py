"""Folders of finished steps: files are written atomically, `manifest.json` last."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.metadata import version
from pathlib import Path
from subprocess import run
from typing import TYPE_CHECKING, TypedDict

from components.core import files
from components.core.digests import digest_file, digest_json
from components.core.errors import CasemateError

if TYPE_CHECKING:  # workers import this module: spare them mlflow
    from pipelines.runtime.tracking import StepRun

MANIFEST = "manifest.json"
READ_UP_TO = 2**22  # bytes of a file that is read to see whether it changed
SCRATCH = "unfinished"  # parts and checkpoints: what a resumed step needs


class FileEntry(TypedDict):
    """A file of a finished step."""

    sha256: str
    bytes: int


class InputEntry(TypedDict):
    """A step that another step was made from; `content` is the digest of its files."""

    fingerprint: str
    mlflow_run_id: str
    content: str


class Provenance(TypedDict):
    """Code, software and inputs of a result."""

    git_revision: str | None
    software: dict[str, str]
    fingerprint: str
    mlflow_run_id: str
    inputs: dict[str, InputEntry]


@cache
def software() -> dict[str, str]:
    """Versions of packages that can change a number; part of every certificate's provenance."""
    names = (
        "casemate",
        "torch",
        "torchvision",
        "timm",
        "numpy",
        "scipy",
        "ray",
        "mlflow",
        "pyarrow",
    )
    return {name: version(name) for name in names}


@cache
def git_revision() -> str | None:
    """The checkout's commit, with `-dirty` where files differ from it; None outside a checkout."""
    here = Path(__file__).resolve().parents[2]
    if not (here / ".git").exists():
        return os.environ.get("CASEMATE_REVISION")
    head = run(
        ["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    dirty = run(
        ["git", "-C", str(here), "status", "--porcelain"],
        capture_output=True,
        text=True,
        check=False,
    )
    if head.returncode:
        return None
    return head.stdout.strip() + ("-dirty" if dirty.stdout.strip() else "")


@dataclass(frozen=True)
class StageDir:
    """Where one step writes; `inputs` are the finished folders it reads."""

    path: Path
    step: str
    fingerprint: str
    run: "StepRun"
    inputs: Mapping[str, Path] = field(default_factory=dict)

    @property
    def part(self) -> str:
        """The part of the name after the stage: `standard` of `train.standard`."""
        return self.step.partition(".")[2]

    @property
    def scratch(self) -> Path:
        """A folder for what only a resumed step needs; removed when the step is finished."""
        folder = self.path / SCRATCH
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def trained_in(self, model: str) -> str | None:
        """The MLflow run that trained a model which this step reads; None for a given one."""
        folder = self.inputs.get(f"train.{model}")
        manifest = read_manifest(folder) if folder else None
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
        manifests = {name: read_manifest(path) for name, path in sorted(self.inputs.items())}
        return {
            "git_revision": git_revision(),
            "software": software(),
            "fingerprint": self.fingerprint,
            "mlflow_run_id": self.run.run_id,
            "inputs": {name: m.as_input() for name, m in manifests.items() if m},
        }

    def finish(self) -> None:
        """Finish the step: remove scratch files, then write the manifest with all digests."""
        shutil.rmtree(self.path / SCRATCH, ignore_errors=True)
        for stale in files.leftovers(self.path):
            stale.unlink()
        written = sorted(p for p in self.path.rglob("*") if p.is_file() and p.name != MANIFEST)
        listing = {
            p.relative_to(self.path).as_posix(): {
                "sha256": digest_file(p),
                "bytes": p.stat().st_size,
            }
            for p in written
        }
        relative = {n: os.path.relpath(p, self.path) for n, p in sorted(self.inputs.items())}
        self.write_json(
            MANIFEST,
            {"step": self.step, "input_folders": relative, "files": listing, **self.provenance()},
        )


@dataclass(frozen=True, slots=True)
class Manifest:
    """The manifest of a finished step, as far as it is read again; a missing key is empty."""

    step: str = ""
    fingerprint: str = ""
    mlflow_run_id: str = ""
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    inputs: Mapping[str, InputEntry] = field(default_factory=dict)
    input_folders: Mapping[str, str] = field(default_factory=dict)
    """Relative to the step's own folder: the storage may move."""

    @property
    def content(self) -> str:
        """A digest of the step's files."""
        return digest_json(dict(self.files))

    def as_input(self) -> InputEntry:
        """This step as an input in the manifest of another."""
        return {
            "fingerprint": self.fingerprint,
            "mlflow_run_id": self.mlflow_run_id,
            "content": self.content,
        }


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a finished step, None where there is none yet."""
    try:
        document = json.loads((folder / MANIFEST).read_text())
        known = {entry.name for entry in fields(Manifest)} & document.keys()
        return Manifest(**{name: document[name] for name in known})
    except FileNotFoundError:
        return None
    except (json.JSONDecodeError, AttributeError) as error:
        raise CasemateError(
            "storage", folder / MANIFEST, f"is damaged ({error}); delete it to redo the step"
        ) from error


def is_finished(folder: Path, fingerprint: str) -> bool:
    """A step is finished when its manifest names its fingerprint and its files are all there."""
    manifest = read_manifest(folder)
    if manifest is None or manifest.fingerprint != fingerprint:
        return False
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file() or not _unchanged(path, entry):
            raise CasemateError(
                "storage", path, "is missing or changed; restore it or redo the step with --force"
            )
    return True


def _unchanged(path: Path, entry: FileEntry) -> bool:
    """Same size, and same digest if the file is small; `verify` reads files of any size."""
    if path.stat().st_size != entry["bytes"]:
        return False
    return entry["bytes"] > READ_UP_TO or digest_file(path) == entry["sha256"]


def changed_files(folder: Path) -> list[str]:
    """Files of a finished step that differ from its manifest; none without a manifest."""
    manifest = read_manifest(folder)
    return [
        name
        for name, entry in (manifest.files.items() if manifest else ())
        if not (folder / name).is_file() or digest_file(folder / name) != entry["sha256"]
    ]


def is_made_from(folder: Path, inputs: Mapping[str, Path]) -> bool:
    """Whether a finished step was made from the current contents of its inputs."""
    manifest = read_manifest(folder)
    if manifest is None:
        return False
    for name, source in inputs.items():
        now, then = read_manifest(source), manifest.inputs.get(name)
        if now is None or then is None or then["content"] != now.content:
            return False
    return True


def prepare_storage(place: str | Path) -> Path:
    """The storage folder; created, and checked to be writable."""
    root = Path(place)
    if ":/" in str(place):  # a path would quietly become a local folder of that name
        raise CasemateError(
            "storage.root",
            place,  # a Path would show one slash less
            "is a URL; name a folder that all nodes share, e.g. a mounted bucket",
        )
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe = root / f".probe-{os.getpid()}"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise CasemateError(
            "storage.root",
            root,
            f"cannot be written ({error.strerror}); choose another with --storage",
        ) from error
    return root.resolve()


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """One flow at a time per recipe and storage; the lock ends with its process."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CasemateError(
                "storage", folder, "is in use by another run of this recipe; wait for it or stop it"
            ) from error
        yield
