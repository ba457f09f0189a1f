"""Folders of finished steps: files are written atomically, `manifest.json` last."""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock
from functools import cache
from importlib.metadata import version
from pathlib import Path
from subprocess import CalledProcessError, run
from typing import IO, TYPE_CHECKING, TypedDict

from components.core import files
from components.core.digests import digest_file, digest_json
from components.core.errors import CasemateError
from pipelines.runtime.parts import PartStore

if TYPE_CHECKING:  # workers import this module: spare them mlflow
    from pipelines.runtime.tracking import StepRun

LOCKS = ".locks"  # folder beside the steps
MANIFEST = "manifest.json"
READ_UP_TO = 2**22  # bytes of a file that is read to see whether it changed
REVISION_ENV = "CASEMATE_REVISION"  # of code that was sent to a cluster
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
    """The checkout's commit, with `-dirty` where files differ from it.

    Outside a checkout: the revision that a submission has sent along, else None.
    """
    here = Path(__file__).resolve().parents[2]
    if not (here / ".git").exists():
        return os.environ.get(REVISION_ENV)
    head = _git(here, "rev-parse", "HEAD")
    return head and head + ("-dirty" if _git(here, "status", "--porcelain") else "")


def _git(here: Path, *arguments: str) -> str | None:
    """The output of a git command; None if it fails or git is not installed."""
    try:
        done = run(["git", "-C", str(here), *arguments], capture_output=True, text=True, check=True)
    except (OSError, CalledProcessError):
        return None
    return done.stdout.strip()


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

    def parts(self, what: str, *, run_id: str) -> PartStore:
        """Results of units of this step, kept until it is finished; `run_id` is their identity."""
        return PartStore.in_folder(self.scratch / what, run_id=run_id)

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
    refuse_url(place, key="storage.root")
    root = Path(place)
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


def refuse_url(place: str | Path, *, key: str) -> None:
    """Refuse a URL as storage: as a path it would quietly become a local folder of that name."""
    if ":/" in str(place):  # a Path has one slash less
        remedy = "is a URL; name a folder that all nodes share, e.g. a mounted bucket"
        raise CasemateError(key, place, remedy)


@contextmanager
def hold(folder: Path, *, write: Iterable[str] = (), read: Iterable[str] = ()) -> Iterator[None]:
    """Lock steps of a recipe's folder: one process writes a step, and none while others read it.

    Runs that write different steps may go on side by side. Locks end with their process.
    """
    with ExitStack() as held:
        for name, kind in [*((n, LOCK_SH) for n in read), *((n, LOCK_EX) for n in write)]:
            lock = held.enter_context(_lock_file(folder, name))
            try:
                flock(lock, kind | LOCK_NB)
            except BlockingIOError as error:
                remedy = "is in use by another run of this recipe; wait for it or stop it"
                raise CasemateError("storage", folder / name, remedy) from error
        yield


@contextmanager
def in_turn(folder: Path, name: str) -> Iterator[None]:
    """Wait for other processes that do the same, then go on alone."""
    with _lock_file(folder, name) as lock:
        flock(lock, LOCK_EX)
        yield


def _lock_file(folder: Path, name: str) -> IO[str]:
    """A file beside the step's folder, which may be removed while it is locked."""
    place = folder / LOCKS
    place.mkdir(parents=True, exist_ok=True)
    return (place / name).open("a+")  # NFS: reading for shared locks, writing for exclusive ones
