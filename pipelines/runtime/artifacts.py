"""Folders of finished steps: files by write-then-rename, `manifest.json` last."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from subprocess import run
from typing import TYPE_CHECKING, Any

from components.core.digests import digest_file, digest_json
from components.core.errors import CasemateError

if TYPE_CHECKING:  # workers import this module: spare them mlflow
    from pipelines.runtime.tracking import StepRun

MANIFEST = "manifest.json"
READ_UP_TO = 2**22  # bytes of a file that is read to see whether it changed
SCRATCH = "unfinished"  # parts and checkpoints: what a resumed step needs


@cache
def software() -> dict[str, str]:
    """Versions that can move a number; part of every certificate's provenance."""
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
        """Which of its kind this step is: `standard` of `train.standard`."""
        return self.step.partition(".")[2]

    @property
    def scratch(self) -> Path:
        """A folder for what only a resumed step needs; removed when the step is finished."""
        folder = self.path / SCRATCH
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def write_bytes(self, name: str, content: bytes) -> Path:
        """A file that is there whole or not at all."""
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.partial")
        partial.write_bytes(content)
        partial.replace(target)
        return target

    def write_text(self, name: str, text: str) -> Path:
        return self.write_bytes(name, text.encode())

    def write_json(self, name: str, value: object) -> Path:
        return self.write_text(
            name, json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n"
        )

    def provenance(self) -> dict[str, Any]:
        """Who made this from what: revision, versions, fingerprints and MLflow runs of inputs."""
        return {
            "git_revision": git_revision(),
            "software": software(),
            "fingerprint": self.fingerprint,
            "mlflow_run_id": self.run.run_id,
            "inputs": {
                name: {
                    "fingerprint": manifest["fingerprint"],
                    "mlflow_run_id": manifest["mlflow_run_id"],
                    "content": digest_json(manifest["files"]),
                }
                for name, manifest in (
                    (n, read_manifest(p)) for n, p in sorted(self.inputs.items())
                )
                if manifest
            },
        }

    def finish(self) -> None:
        """Seal the step: scratch goes, the manifest with every file's digest comes last."""
        shutil.rmtree(self.path / SCRATCH, ignore_errors=True)
        files = sorted(p for p in self.path.rglob("*") if p.is_file() and p.name != MANIFEST)
        listing = {
            p.relative_to(self.path).as_posix(): {
                "sha256": digest_file(p),
                "bytes": p.stat().st_size,
            }
            for p in files
        }
        relative = {n: os.path.relpath(p, self.path) for n, p in sorted(self.inputs.items())}
        self.write_json(
            MANIFEST,
            {"step": self.step, "input_folders": relative, "files": listing, **self.provenance()},
        )


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a finished step, None where there is none yet."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    except FileNotFoundError:
        return None
    except json.JSONDecodeError as error:
        raise CasemateError(
            "storage", folder / MANIFEST, f"is damaged ({error}); delete it to redo the step"
        ) from error
    return manifest


def is_finished(folder: Path, fingerprint: str) -> bool:
    """A step is finished when its manifest names its fingerprint and its files are all there."""
    manifest = read_manifest(folder)
    if manifest is None or manifest["fingerprint"] != fingerprint:
        return False
    for name, entry in manifest["files"].items():
        path = folder / name
        if not path.is_file() or not _unchanged(path, entry):
            raise CasemateError(
                "storage", path, "is missing or changed; restore it or redo the step with --force"
            )
    return True


def _unchanged(path: Path, entry: Mapping[str, Any]) -> bool:
    """Same size, and same digest where reading it costs nothing; `verify` reads everything."""
    if path.stat().st_size != entry["bytes"]:
        return False
    return bool(entry["bytes"] > READ_UP_TO or digest_file(path) == entry["sha256"])


def changed_files(folder: Path) -> list[str]:
    """Files of a finished step that are not what its manifest lists; none without a manifest."""
    manifest = read_manifest(folder) or {"files": {}}
    return [
        name
        for name, entry in manifest["files"].items()
        if not (folder / name).is_file() or digest_file(folder / name) != entry["sha256"]
    ]


def is_made_from(folder: Path, inputs: Mapping[str, Path]) -> bool:
    """Whether a finished step was made from what its inputs hold now, not from a former state."""
    manifest = read_manifest(folder)
    if manifest is None:
        return False
    for name, source in inputs.items():
        now = read_manifest(source)
        known = manifest["inputs"].get(name, {}).get("content")
        if now is None or known != digest_json(now["files"]):
            return False
    return True


def prepare_storage(place: str | Path) -> Path:
    """The storage folder, made and shown to be writable."""
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
    """One flow at a time per recipe and storage; the lock falls with the process, also killed."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CasemateError(
                "storage", folder, "is in use by another run of this recipe; wait for it or stop it"
            ) from error
        yield
