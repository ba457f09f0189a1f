"""The files of one generation of a finished step, by content: what inputs of later steps are.

Files are fetched when they are first used, to the cache of the node that uses them. On a storage
that is a folder they are read in place. A later `--force` does not change what is read.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from uuid import uuid4

from components.core.digests import digest_json
from components.core.files import put_in_place
from pipelines.runtime.manifests import Manifest
from pipelines.runtime.store import MissingError, Ref, open_store

TRIES = 5


@dataclass(frozen=True)
class StoredFolder:
    """Files of a step in a store, or of a folder in it; can be sent to other machines."""

    root: str  # of the store
    key: str  # of the folder in the store
    files: Mapping[str, Ref]  # by their names in this folder
    place: str  # for people: the path or URI of the folder
    manifest: Manifest  # of the step

    @property
    def name(self) -> str:
        return PurePosixPath(self.key).name

    def __str__(self) -> str:
        return self.place

    def __truediv__(self, name: str) -> Path:
        """A file, fetched; a folder, with all its files; else a path where nothing is."""
        if ref := self.files.get(name):
            return open_store(self.root).local(ref)
        if (inner := self.within(name)).files:
            return inner.fetched()
        return self._gathered() / name

    def absolute(self) -> "StoredFolder":
        return self

    def within(self, name: str) -> "StoredFolder":
        """A folder in this one; nothing is fetched."""
        files = {
            path.removeprefix(f"{name}/"): ref
            for path, ref in self.files.items()
            if path.startswith(f"{name}/")
        }
        key, place = f"{self.key}/{name}", f"{self.place}/{name}"
        return replace(self, key=key, files=files, place=place)

    def fetched(self) -> Path:
        """A folder on this machine with all files under their names: links into the cache."""
        target = self._gathered()
        for name in self.files:
            link, path = target / name, self / name
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink() or link.readlink() != path:
                temporary = link.with_name(f".{link.name}.{uuid4().hex}.tmp")
                temporary.symlink_to(path)
                put_in_place(temporary, link)
        return target

    def read(self, name: str) -> bytes:
        """The content of a file, which the cache need not keep for this process."""
        ref, store = self.files[name], open_store(self.root)
        for _ in range(TRIES):
            try:
                return store.local(ref).read_bytes()
            except FileNotFoundError:  # another thread was done with it, and it was evicted
                continue
            finally:
                if not store.is_local:
                    store.cache.release(ref)
        raise MissingError(f"{self}/{name}", "is evicted again and again; raise CASEMATE_CACHE_GB")

    def _gathered(self) -> Path:
        """Where the files of this folder are gathered: named by storage and content."""
        named = {name: ref.sha256 for name, ref in self.files.items()}
        digest = digest_json([self.root, self.key, named])
        return open_store(self.root).cache.folder / ".folders" / digest[:20] / self.name


def link_or_copy(source: Path, target: Path) -> None:
    """Another name for a file, or a copy on another disk or one without links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
