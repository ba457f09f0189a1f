"""The manifest of a finished step: its files with their digests, its inputs, and its own digest."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypedDict

from components.core import files
from components.core.digests import digest_file, digest_json
from components.core.documents import parse_json
from components.core.errors import CasemateError
from components.core.folders import is_below
from pipelines.runtime.provenance import InputEntry

MANIFEST = "manifest.json"
SIGNATURE = "certificate.dsse.json"  # beside a certificate, and not a file of its step
OWN_DIGEST = "manifest_sha256"
FIRST_FORMAT = {  # keys of manifests that did not protect themselves (version 0.1)
    *("step", "input_folders", "files", "inputs"),
    *("git_revision", "software", "fingerprint", "mlflow_run_id"),
}
REMEDY = "redo the step with --force"
SHA256 = re.compile(r"[0-9a-f]{64}")


class FileEntry(TypedDict):
    """A file of a finished step."""

    sha256: str
    bytes: int


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
    execution: Mapping[str, object] = field(default_factory=dict)  # empty: not recorded
    generation: int | None = None  # None: written before there were generations
    git_revision: str | None = None  # of the code
    software: Mapping[str, str] = field(default_factory=dict)  # versions of packages

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


def manifest_text(values: Mapping[str, object]) -> str:
    """The document with its own digest in it."""
    return files.json_text({**values, OWN_DIGEST: digest_json(dict(values))})


def parse_manifest(text: str | bytes, *, source: object) -> Manifest:
    """A manifest; a damaged one is an error that names `source`."""
    try:
        document: dict[str, Any] = parse_json(text)
        keys = document.keys() - {OWN_DIGEST}
        body = {name: document[name] for name in keys}
        _check_own_digest(document.get(OWN_DIGEST), body)
        known = {entry.name for entry in fields(Manifest)} & keys
        return _checked(Manifest(**{name: document[name] for name in known}))
    except (ValueError, AttributeError) as error:
        raise CasemateError("storage", source, f"is damaged ({error}); {REMEDY}") from error


def _check_own_digest(recorded: str | None, body: Mapping[str, object]) -> None:
    """Raise unless a manifest is as it was written; those of version 0.1 cannot tell."""
    if recorded is None and not body.keys() <= FIRST_FORMAT:
        raise ValueError(f"it lacks {OWN_DIGEST}")
    if recorded is not None and recorded != digest_json(dict(body)):
        raise ValueError("it does not match its own digest")


def _checked(manifest: Manifest) -> Manifest:
    """The manifest; raises for what no step writes: a manifest is as trusted as its storage."""
    for name, entry in manifest.files.items():
        if not is_below(name):
            raise ValueError(f"its file {name!r} is not below the step")
        if not (isinstance(entry, dict) and is_content(entry.get("sha256"), entry.get("bytes"))):
            raise ValueError(f"it does not give digest and size of {name}")
    texts: list[object] = [manifest.step, manifest.fingerprint, manifest.mlflow_run_id]
    texts += [*manifest.input_folders.values()]
    texts += [text for entry in manifest.inputs.values() for text in entry.values()]
    texts += [*manifest.software, *manifest.software.values(), manifest.git_revision or ""]
    is_number = isinstance(manifest.generation, int | None)
    is_number &= isinstance(manifest.execution, dict)
    if not is_number or not all(isinstance(text, str) for text in texts):
        raise ValueError("it holds a value of another type")
    return manifest


def is_content(sha256: object, size: object) -> bool:
    """Whether these are the digest and the size of a file."""
    if not isinstance(sha256, str) or not SHA256.fullmatch(sha256):
        return False
    return isinstance(size, int) and not isinstance(size, bool) and size >= 0


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest in the folder of a finished step, None where there is none yet."""
    try:
        return parse_manifest((folder / MANIFEST).read_bytes(), source=folder / MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        return None


def other_manifests(folder: Path) -> list[str]:
    """The newest manifest of the storage in this folder, if people see another one."""
    kept = sorted(folder.glob(f"[0-9]*.{MANIFEST}"))
    if not kept or not (folder / MANIFEST).is_file():
        return []
    same = kept[-1].read_bytes() == (folder / MANIFEST).read_bytes()
    return [] if same else [kept[-1].name]


def changed_files(folder: Path, manifest: Manifest | None = None) -> list[str]:
    """Files of a finished step that differ from its manifest; none without a manifest."""
    known = manifest or read_manifest(folder)
    return [
        name
        for name, entry in (known.files.items() if known else ())
        if not (folder / name).is_file() or digest_file(folder / name) != entry["sha256"]
    ]
