"""A folder as a store of keys: a key is created once, whole and on disk, or not at all.

Content is written to a file of its own in `.writing`, synced, and then linked to its key: unlike a
rename, a link fails if the key exists. Names that begin with a dot are not keys.
"""

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from components.core.files import put_in_place
from pipelines.runtime.store_errors import StoreError, folder_error, missing

WRITING = ".writing"  # below the root
ABANDONED = 24 * 3600.0  # age in seconds at which an unfinished write is removed


class Entry(NamedTuple):
    """A key in a listing."""

    key: str
    bytes: int
    modified: float


class FolderBackend:
    """Keys below a folder, which is created with the first write."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, key: str) -> Path:
        return self.root / key

    def create(self, key: str, content: bytes) -> bool:
        """Create a key; False if it exists."""
        with self._written(key) as temporary:
            temporary.write_bytes(content)
            sync(temporary)
            return self._link(temporary, key)

    def create_from(self, key: str, source: Path) -> bool:
        """Create a key from a file, as a hard link to it if that works; False if it exists."""
        with self._written(key) as temporary:
            try:
                sync(source)
                os.link(source, temporary)
            except OSError:  # another disk, or links are forbidden
                shutil.copyfile(source, temporary)
                sync(temporary)
            return self._link(temporary, key)

    def replace_from(self, key: str, source: Path) -> None:
        """Replace the content of a key by that of a file."""
        with self._written(key) as temporary:
            shutil.copyfile(source, temporary)
            sync(temporary)
            put_in_place(temporary, self.path(key))
            sync(self.path(key).parent)

    def get(self, key: str) -> bytes | None:
        """The content of a key; None if the key does not exist."""
        with self._errors(key):
            try:
                return self.path(key).read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                return None

    def get_range(self, key: str, start: int, length: int) -> bytes:
        with self._errors(key):
            try:
                with self.path(key).open("rb") as file:
                    file.seek(start)
                    return file.read(length)
            except FileNotFoundError as error:
                raise missing(self.path(key)) from error

    def chunks(self, key: str) -> Iterator[bytes]:
        """The content of a key in pieces."""
        with self._errors(key):
            try:
                with self.path(key).open("rb") as file:
                    while chunk := file.read(2**22):
                        yield chunk
            except FileNotFoundError as error:
                raise missing(self.path(key)) from error

    def listing(self, prefix: str) -> list[Entry]:
        """Keys below a folder, in any order."""
        with self._errors(prefix):
            return list(_walk(str(self.path(prefix)), f"{prefix}/" if prefix else ""))

    def delete(self, keys: Sequence[str]) -> None:
        """Remove keys and the folders that are empty then; missing keys are fine."""
        folders = {self.path(key).parent for key in keys}
        home = self.root.resolve()
        for folder in folders:
            if not folder.resolve().is_relative_to(home):
                raise StoreError(folder, "leads out of the storage; remove the link")
        for key in keys:
            with self._errors(key):
                self.path(key).unlink(missing_ok=True)
        for folder in folders:
            self._remove_empty(folder)

    def modified(self, key: str) -> float:
        """When a key was created, by the clock of the file system."""
        with self._errors(key):
            return self.path(key).stat().st_mtime

    def sweep(self) -> None:
        """Remove what killed writers left behind."""
        now = time.time()
        for rest in (self.root / WRITING).glob("*"):
            with suppress(FileNotFoundError):
                if now - rest.stat().st_mtime > ABANDONED:
                    rest.unlink()

    @contextmanager
    def _written(self, key: str) -> Iterator[Path]:
        """A file for new content; removed after the block, when it has its other name."""
        temporary = self.root / WRITING / uuid4().hex
        with self._errors(key):
            try:
                temporary.parent.mkdir(parents=True, exist_ok=True)
                yield temporary
            finally:
                temporary.unlink(missing_ok=True)

    def _link(self, temporary: Path, key: str) -> bool:
        target = self.path(key)
        for _ in range(100):  # another process may remove the folder while it is empty
            try:
                _make_folders(target.parent)
                os.link(temporary, target)
            except FileExistsError:
                return False
            except FileNotFoundError:
                continue
            break
        else:
            raise FileNotFoundError(2, "its folder is removed again and again", str(target))
        sync(target.parent)
        return True

    def _remove_empty(self, folder: Path) -> None:
        while folder != self.root and self.root in folder.parents:
            try:
                folder.rmdir()
            except OSError:  # not empty, or gone
                return
            folder = folder.parent

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise folder_error(error, self.path(key)) from error


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _make_folders(folder: Path) -> None:
    """Create a folder and those above it, on disk."""
    if folder.is_dir():
        return
    _make_folders(folder.parent)
    folder.mkdir(exist_ok=True)
    sync(folder.parent)


def _walk(folder: str, prefix: str) -> Iterator[Entry]:
    try:
        entries = os.scandir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    with entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            # A link may lead out of the storage, and what is listed may be deleted.
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(entry.path, f"{prefix}{entry.name}/")
                continue
            with suppress(FileNotFoundError):  # deleted meanwhile
                stat = entry.stat(follow_symlinks=False)
                yield Entry(prefix + entry.name, stat.st_size, stat.st_mtime)
