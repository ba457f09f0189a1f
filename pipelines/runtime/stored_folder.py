"""The files of one generation of a finished step, by content: what inputs of later steps are.

Files are fetched when they are first used, to the cache of the node that uses them. On a storage
that is a folder they are read in place. A later `--force` does not change what is read.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from tempfile import mkdtemp

from components.core.digests import digest_json
from components.core.files import move_folder
from pipelines.runtime.manifests import Manifest
from pipelines.runtime.store import Ref, open_store


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
        """A folder on this machine with all files under their names, made once."""
        target = self._gathered()
        if target.is_dir():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        making = Path(mkdtemp(prefix=".making-", dir=target.parent))
        try:
            for name in self.files:
                (making / name).parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(self / name, making / name)
            move_folder(making, target)
        except OSError:
            if not target.is_dir():  # another process was faster
                raise
        finally:
            shutil.rmtree(making, ignore_errors=True)
        return target

    def _gathered(self) -> Path:
        """Where the files of this folder are gathered: named by their content."""
        digest = digest_json({name: ref.sha256 for name, ref in self.files.items()})
        return open_store(self.root).cache.folder / ".folders" / digest[:20] / self.name


def link_or_copy(source: Path, target: Path) -> None:
    """Another name for a file, or a copy on another disk or one without links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
