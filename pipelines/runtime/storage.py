"""Where the steps of flows are kept: a folder, or a prefix of a bucket, with the same keys.

    <recipe>/<step>-<fingerprint>/files/<sha256>/<name>   published files, named by their content
    <recipe>/<step>-<fingerprint>/000000.manifest.json    published once; all that readers trust
    <recipe>/<step>-<fingerprint>/generations/000001      a `--force`: its manifest has this number
    <recipe>/<step>-<fingerprint>/unfinished/...          what only a resumed step needs

A storage that is a folder also shows each step as plain files beside these, for people: hard links
of the files of its manifest. infra/decisions/0007-create-only-storage.md says why nothing is
overwritten.
"""

import posixpath
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from uuid import uuid4

from components.core import files as writing
from components.core.digests import digest_bytes, digest_file
from components.core.errors import CasemateError
from components.core.folders import Folder
from components.core.object_stores import is_uri, uri_problem
from pipelines.runtime.manifests import (
    MANIFEST,
    SIGNATURE,
    FileEntry,
    Manifest,
    manifest_text,
    parse_manifest,
    read_manifest,
)
from pipelines.runtime.store import Ref, Store, open_store
from pipelines.runtime.stored_folder import StoredFolder, link_or_copy

FILES, GENERATIONS = "files", "generations"  # folders of a step
SCRATCH = "unfinished"  # parts and checkpoints: what a resumed step needs
READ_UP_TO = 2**22  # bytes of a file that is read to see whether it changed
STORAGE_KEY = "storage.root"
STEP_URI = re.compile(r"(\w+://.+?)/([^/]+)/([^/]+-[0-9a-f]{12})(?:/(.+))?")


@dataclass(frozen=True)
class Storage:
    """A folder or an object store with the steps of flows."""

    root: str  # absolute path, or URI

    @staticmethod
    def at(place: "str | Path | Storage") -> "Storage":
        """The storage at a path or URI; nothing is read or created."""
        if isinstance(place, Storage):
            return place
        text = str(place)
        return Storage(text.rstrip("/") if is_uri(text) else str(Path(text).resolve()))

    def __str__(self) -> str:
        return self.root

    @property
    def is_local(self) -> bool:
        return not is_uri(self.root)

    @cached_property
    def store(self) -> Store:
        return open_store(self.root)

    @property
    def path(self) -> Path:
        """On this machine: the folder itself, or one for the work of this machine on a store."""
        if self.is_local:
            return Path(self.root)
        name = digest_bytes(self.root.encode())[:16]
        return self.store.cache.folder / ".work" / name

    def step(self, recipe: str, folder: str) -> "StepPlace":
        return StepPlace(self, f"{recipe}/{folder}")


def open_storage(place: "str | Path | Storage") -> Storage:
    """A storage that can be written: a folder is created, a store probed."""
    refuse_odd_uri(str(place), key=STORAGE_KEY)
    storage = Storage.at(place)
    try:
        storage.path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=storage.path):
            pass
    except OSError as error:
        raise CasemateError(
            STORAGE_KEY,
            storage.path,
            f"cannot be written ({error.strerror}); choose another with --storage",
        ) from error
    storage.store.check_create_only()
    return storage


def refuse_odd_uri(place: str | Path, *, key: str) -> None:
    """Refuse a URI of a kind that is not supported: as a path it would become a local folder."""
    if remedy := uri_problem(str(place)):
        raise CasemateError(key, place, remedy)


@dataclass(frozen=True)
class StepPlace:
    """The place of one step in a storage."""

    storage: Storage
    key: str  # demo/prepare-0123456789ab

    def __str__(self) -> str:
        return f"{self.storage.root}/{self.key}"

    @property
    def recipe(self) -> str:
        return self.key.partition("/")[0]

    @property
    def path(self) -> Path:
        """The step's folder: what people see of it, or what this machine keeps for a bucket."""
        return self.storage.path / self.key

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def work(self) -> Path:
        """Where this machine writes the step's files; a result that is shown stays until then."""
        return self.path / SCRATCH / "work" if (self.path / MANIFEST).exists() else self.path

    @property
    def store(self) -> Store:
        return self.storage.store

    # Reading --------------------------------------------------------------------------------------

    def generation(self) -> int:
        """0, or the number of the last `--force`."""
        found = self.store.listing(f"{self.key}/{GENERATIONS}")
        return max((int(entry.key.rpartition("/")[2]) for entry in found), default=0)

    def manifest(self) -> Manifest | None:
        """The manifest of the current generation; None: the step is not finished."""
        if self.storage.is_local and not self.path.is_dir():
            return None
        return self._manifest_of(self.generation())

    def published(self) -> Manifest | None:
        """The newest manifest: that of an earlier generation while the current one is made."""
        numbers = range(self.generation(), -1, -1)
        return next((m for number in numbers if (m := self._manifest_of(number))), None)

    def _manifest_of(self, number: int) -> Manifest | None:
        key = self.manifest_key(number)
        content = self.store.find(key)
        if content is not None:
            return parse_manifest(content, source=f"{self.storage.root}/{key}")
        # A step of version 0.1 has its files under their plain names.
        earlier = read_manifest(self.path) if self.storage.is_local and not number else None
        return earlier if earlier and earlier.generation is None else None

    def open(self) -> StoredFolder:
        """The files of the finished step; what a `--force` replaces counts until it is finished."""
        manifest = self.published()
        if manifest is None:
            raise CasemateError("storage", self, "is not finished; run its recipe first")
        return self.contents(manifest)

    def contents(self, manifest: Manifest) -> StoredFolder:
        """The files of a manifest of this step."""
        return StoredFolder(self.storage.root, self.key, self.refs(manifest), str(self), manifest)

    def is_finished(self, fingerprint: str) -> bool:
        """Whether its manifest names this fingerprint; a file that is missing is an error."""
        manifest = self.manifest()
        if manifest is None or manifest.fingerprint != fingerprint:
            return False
        refs = self.refs(manifest)
        stored = {} if self.storage.is_local else self._sizes()
        for name, ref in refs.items():
            if self.storage.is_local:
                self._check_file(name, ref)
            elif stored.get(ref.key) != ref.bytes:  # its content is checked when it is read
                raise self._changed(ref.key)
        if self.storage.is_local and manifest.generation is not None:
            self._check_copy(self.manifest_key(manifest.generation))
        return True

    def _check_file(self, name: str, ref: Ref) -> None:
        """Raise unless a file is stored, and what people see under its name is that file."""
        kept, shown = Path(self.storage.root) / ref.key, self.path / name
        if not _is_intact(kept, ref):
            raise self._changed(ref.key)
        if not shown.exists():
            self._link(shown, kept)
        elif not shown.samefile(kept) and not _is_intact(shown, ref):
            raise self._changed(f"{self.key}/{name}")

    def _check_copy(self, key: str) -> None:
        """Raise unless the manifest that people see is the published one; restore a missing one."""
        shown, text = self.path / MANIFEST, self.store.get(key)
        if not shown.exists():
            writing.write_atomic(shown, text)
        elif shown.read_bytes() != text:
            raise self._changed(f"{self.key}/{MANIFEST}")

    def _changed(self, key: str) -> CasemateError:
        remedy = "is missing or changed; restore it or redo the step with --force"
        return CasemateError("storage", f"{self.storage.root}/{key}", remedy)

    def _sizes(self) -> dict[str, int]:
        return {e.key: e.bytes for e in self.store.listing(f"{self.key}/{FILES}")}

    def refs(self, manifest: Manifest) -> dict[str, Ref]:
        """The files of a manifest by their names."""
        plain = manifest.generation is None
        return {
            name: Ref(
                f"{self.key}/{name}" if plain else self._file_key(name, entry["sha256"]),
                entry["sha256"],
                entry["bytes"],
            )
            for name, entry in manifest.files.items()
        }

    def _file_key(self, name: str, sha256: str) -> str:
        return f"{self.key}/{FILES}/{sha256[:20]}/{name}"

    def manifest_key(self, generation: int) -> str:
        return f"{self.key}/{generation:06d}.{MANIFEST}"

    # Writing --------------------------------------------------------------------------------------

    def put_file(self, name: str, path: Path) -> Ref:
        """Store a file of the step under its content's name; it is published by the manifest."""
        return self.store.put_file(self.key, name, path)

    def publish(
        self, facts: Mapping[str, object], *, stored: Mapping[str, Ref], fence: int = 0
    ) -> Manifest:
        """Store the files in `work` and write the manifest; returns it, or the one before it.

        `stored` are files that workers have stored themselves.
        """
        refs, work = dict(stored), self.work
        for name in self.written():
            path, there = work / name, stored.get(name)
            if there is None or digest_file(path) != there.sha256:
                refs[name] = self.put_file(name, path)
        listing: dict[str, FileEntry] = {
            name: {"sha256": refs[name].sha256, "bytes": refs[name].bytes} for name in sorted(refs)
        }
        number = self.generation()
        values = {**facts, "files": listing, "generation": number, "fence": fence}
        key = self.manifest_key(number)
        text = manifest_text(values).encode()
        if not self.store.put_new(key, text):
            text = self.store.get(key)  # another run was faster: its files count
        manifest = parse_manifest(text, source=f"{self.storage.root}/{key}")
        self._show(manifest, text)
        return manifest

    def written(self) -> list[str]:
        """Files of the step in `work`, by their names."""
        work = self.work
        for stale in writing.leftovers(work):
            stale.unlink()
        found = (p.relative_to(work) for p in work.rglob("*") if p.is_file())
        names = (p.as_posix() for p in found)
        return sorted(n for n in names if n != SIGNATURE and not belongs_to_storage(n))

    def _show(self, manifest: Manifest, text: bytes) -> None:
        """Let the step's folder show the files of its manifest under their names."""
        if not self.storage.is_local:
            shutil.rmtree(self.path, ignore_errors=True)
            return
        refs = self.refs(manifest)
        for name, ref in refs.items():
            shown, kept = self.path / name, Path(self.storage.root) / ref.key
            if not (shown.exists() and shown.samefile(kept)):
                self._link(shown, kept)
        for path in [p for p in self.path.rglob("*") if p.is_file()]:
            name = path.relative_to(self.path).as_posix()
            if name not in refs and not belongs_to_storage(name):
                path.unlink()  # of an earlier generation
        writing.write_atomic(self.path / MANIFEST, text)

    def _link(self, shown: Path, kept: Path) -> None:
        shown.parent.mkdir(parents=True, exist_ok=True)
        with writing.atomic(shown, sync=False) as temporary:
            link_or_copy(kept, temporary)

    def renew(self, why: str) -> None:
        """Begin a new generation; the last one counts for readers until this one is published."""
        number = self.generation() + 1
        claim = writing.json_text({"why": why, "token": uuid4().hex}).encode()
        while not self.store.put_new(f"{self.key}/{GENERATIONS}/{number:06d}", claim):
            number += 1
        self.clear_scratch()

    def clear_scratch(self) -> None:
        """Remove what only a resumed step needs."""
        shutil.rmtree(self.path / SCRATCH, ignore_errors=True)
        if not self.storage.is_local:
            left = self.store.listing(f"{self.key}/{SCRATCH}")
            self.store.delete([entry.key for entry in left])


def is_numbered(name: str) -> bool:
    """Whether it is the manifest of a generation."""
    return name.endswith(f".{MANIFEST}") and name.partition(".")[0].isdigit()


def belongs_to_storage(name: str) -> bool:
    """Whether a path in a step's folder belongs to the storage and not to the step."""
    first = name.partition("/")[0]
    return first in (FILES, GENERATIONS, SCRATCH, MANIFEST) or is_numbered(name)


def _is_intact(path: Path, ref: Ref) -> bool:
    """Same size, and same digest if the file is small; `verify` reads files of any size."""
    if not path.is_file() or path.stat().st_size != ref.bytes:
        return False
    return ref.bytes > READ_UP_TO or digest_file(path) == ref.sha256


def step_at(uri: str) -> StoredFolder:
    """The folder of a finished step, or one in it, by its URI."""
    found = STEP_URI.fullmatch(uri.rstrip("/"))
    if found is None:
        remedy = "is not a step of a storage; write s3://bucket/prefix/RECIPE/STEP-FINGERPRINT"
        raise CasemateError("storage", uri, remedy)
    root, recipe, step, rest = found.groups()
    folder = Storage.at(root).step(recipe, step).open()
    return folder.within(rest) if rest else folder


def input_of(folder: Folder, relative: str) -> Folder:
    """A folder that a step has read, by the name in its manifest."""
    if not isinstance(folder, StoredFolder):
        return folder / relative
    key = posixpath.normpath(f"{folder.key}/{relative}")
    if key.startswith(("..", "/")):  # a given folder of the machine that made the step
        return Path(folder.root, folder.key, relative)
    recipe, _, step = key.partition("/")
    return Storage.at(folder.root).step(recipe, step).open()
