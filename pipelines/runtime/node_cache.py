"""Files of a remote storage on the disk of one node, by digest: fetched once for all processes.

    <digest>/content     the file
    <digest>/named/...   hard links to it with the names that readers expect
    <digest>/partial     a download that is not finished; its size is reserved from the start
    .pins/<process>      digests that a living process uses; it holds a lock on this file
    .fills/<digest>      locked by the process that downloads
    .guard               shared by processes that pin a file, exclusive for one that evicts

`flock` is used here only, where the disk belongs to one node. A lock ends with its process.
"""

import errno
import hashlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from components.core.digests import digest_file
from components.core.errors import CasemateError
from components.core.files import put_in_place
from pipelines.runtime.store_errors import DamagedError

FOLDER_ENV = "CASEMATE_CACHE"
LIMIT_ENV = "CASEMATE_CACHE_GB"
LIMIT_GB = 50.0
GB = 10**9
CONTENT, PARTIAL = "content", "partial"


class Ref(NamedTuple):
    """A stored file by content: what manifests list, workers get and `Store.local` takes.

    Readers see the last part of its key as its name.
    """

    key: str
    sha256: str
    bytes: int


class Stamp(NamedTuple):
    """Changes with the content of a file."""

    inode: int
    bytes: int
    modified: int


def stamp(path: Path) -> Stamp | None:
    """The stamp of a file; None if there is none."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Stamp(found.st_ino, found.st_size, found.st_mtime_ns)


class CheckedFiles:
    """Files whose digest this process has compared; compared again when they change."""

    def __init__(self) -> None:
        self._good: dict[Path, tuple[Stamp, str]] = {}

    def holds(self, path: Path, ref: Ref) -> bool:
        """Whether a file has the content of `ref`."""
        now = stamp(path)
        if now is None or now.bytes != ref.bytes:
            return False
        if self._good.get(path) == (now, ref.sha256):
            return True
        if digest_file(path) != ref.sha256:
            return False
        self._good[path] = (now, ref.sha256)
        return True


def default_folder() -> Path:
    """`CASEMATE_CACHE`, else a folder of this user on the disk for temporary files."""
    named = os.environ.get(FOLDER_ENV)
    return Path(named or Path(tempfile.gettempdir(), f"casemate-cache-{os.getuid()}")).absolute()


def default_limit() -> int:
    """Bytes by `CASEMATE_CACHE_GB`, else 50 GB."""
    text = os.environ.get(LIMIT_ENV, "") or str(LIMIT_GB)
    try:
        limit = float(text)
    except ValueError:
        limit = -1.0
    if not 0 < limit < 1e9:
        raise CasemateError(LIMIT_ENV, text, "is not a size; write gigabytes, e.g. 50")
    return int(limit * GB)


class NodeCache:
    """The cache of this node; `folder` and `limit` (bytes) default to the environment's."""

    def __init__(self, folder: Path | None = None, limit: int | None = None) -> None:
        self.folder = default_folder() if folder is None else Path(folder)
        self.limit = default_limit() if limit is None else limit
        self._checked = CheckedFiles()
        self._pins: int | None = None  # descriptor of the own file in `.pins`
        self._pinned_here: set[str] = set()  # what it says
        self._lock = threading.Lock()

    def path(self, ref: Ref, fetch: Callable[[str], Iterable[bytes]], *, where: str) -> Path:
        """The path of a file, downloaded by `fetch(key)` if this node does not have it.

        The file stays until this process ends or calls `release` or `close`.
        """
        home = self.folder / ref.sha256
        with self._errors():
            self._pin(ref.sha256)
            if not self._checked.holds(home / CONTENT, ref):
                self._fill(home, ref, fetch, where)
            return _named(home, Path(ref.key).name)

    def release(self, ref: Ref) -> None:
        """Let a file be evicted; its path may stop to exist at any time from now on."""
        with self._lock:
            if self._pins is not None and ref.sha256 in self._pinned_here:
                self._pinned_here.discard(ref.sha256)
                os.write(self._pins, f"-{ref.sha256}\n".encode())

    def close(self) -> None:
        """Let all files be evicted, as at the end of the process."""
        with self._lock:
            if self._pins is not None:
                os.close(self._pins)
            self._pins, self._pinned_here = None, set()

    def _pin(self, sha256: str) -> None:
        """Keep a file, or the place of one that is about to be downloaded."""
        with self._lock:
            if sha256 in self._pinned_here:
                return
            with self._guard(LOCK_SH):
                if self._pins is None:
                    self._pins = self._new_pins()
                os.write(self._pins, f"+{sha256}\n".encode())
                home = self.folder / sha256
                home.mkdir(exist_ok=True)
                os.utime(home)  # used now: evicted last
            self._pinned_here.add(sha256)

    def _new_pins(self) -> int:
        """The open, locked file of this process in `.pins`."""
        place = self.folder / ".pins"
        place.mkdir(exist_ok=True)
        handle = _open(place / f"{os.getpid()}-{uuid4().hex[:8]}")
        flock(handle, LOCK_EX)
        return handle

    def _fill(
        self, home: Path, ref: Ref, fetch: Callable[[str], Iterable[bytes]], where: str
    ) -> None:
        """Download a file, or wait for the process that does."""
        with self._filling(ref.sha256):
            if self._checked.holds(home / CONTENT, ref):
                return
            partial = home / PARTIAL
            try:
                self._reserve(partial, ref)
                _download(partial, ref, fetch(ref.key), where)
                put_in_place(partial, home / CONTENT)
            finally:
                partial.unlink(missing_ok=True)
            if not self._checked.holds(home / CONTENT, ref):
                remedy = "lost what was written to it; check its disk"
                raise CasemateError("cache", self.folder, remedy)

    def _reserve(self, partial: Path, ref: Ref) -> None:
        """Make room below the limit and on the disk before the download begins."""
        with self._guard(LOCK_EX):
            partial.unlink(missing_ok=True)  # of a process that was killed
            self._evict(ref)
            while True:
                try:
                    with partial.open("wb") as file:
                        if ref.bytes:
                            os.posix_fallocate(file.fileno(), 0, ref.bytes)
                except OSError as error:
                    partial.unlink(missing_ok=True)
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                        raise
                    if not self._evict_one():
                        raise
                else:
                    return

    def _evict(self, ref: Ref) -> None:
        """Remove the longest unused files until this one fits below the limit."""
        used = sum(_bytes_of(home) for home in self._homes())
        while used + ref.bytes > self.limit:
            freed = self._evict_one()
            if not freed:
                needed, limit = (used + ref.bytes) / GB, self.limit / GB
                raise CasemateError(
                    "cache",
                    self.folder,
                    f"needs {needed:.3g} GB for files in use and {Path(ref.key).name}, its limit"
                    f" is {limit:.3g} GB; raise {LIMIT_ENV}",
                )
            used -= freed

    def _evict_one(self) -> int:
        """Remove the longest unused file that no process has pinned; returns its bytes."""
        pinned = self._pinned()
        for home in sorted(self._homes(), key=lambda home: home.stat().st_mtime):
            size = _bytes_of(home)
            if home.name not in pinned:
                shutil.rmtree(home)
                (self.folder / ".fills" / home.name).unlink(missing_ok=True)
                if size:
                    return size
        return 0

    def _homes(self) -> list[Path]:
        return [home for home in self.folder.iterdir() if not home.name.startswith(".")]

    def _pinned(self) -> set[str]:
        """Digests that living processes use; what dead ones left is removed."""
        pinned: set[str] = set()
        for path in (self.folder / ".pins").glob("*"):
            handle = _open(path)
            try:
                flock(handle, LOCK_EX | LOCK_NB)
            except BlockingIOError:
                pinned |= _in_use(path.read_text())
            else:
                path.unlink()
            finally:
                os.close(handle)
        return pinned

    @contextmanager
    def _guard(self, kind: int) -> Iterator[None]:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.folder.stat().st_uid != os.getuid():  # its owner could exchange checked files
            remedy = f"belongs to another user; set {FOLDER_ENV} to a folder of your own"
            raise CasemateError("cache", self.folder, remedy)
        with _locked(self.folder / ".guard", kind):
            yield

    @contextmanager
    def _filling(self, sha256: str) -> Iterator[None]:
        place = self.folder / ".fills"
        place.mkdir(exist_ok=True)
        with _locked(place / sha256, LOCK_EX):
            yield

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Errors of the node's disk in one line."""
        try:
            yield
        except OSError as error:
            cause = error.strerror or str(error)
            remedy = f"cannot be used ({cause}); set {FOLDER_ENV} to a folder of this machine"
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                remedy = (
                    f"is on a full disk; free some space, or set {FOLDER_ENV} to a folder on"
                    " another disk of this machine"
                )
            raise CasemateError("cache", self.folder, remedy) from error


def digest_chunks(chunks: Iterable[bytes]) -> str:
    """SHA-256 of content that comes in pieces."""
    state = hashlib.sha256()
    for chunk in chunks:
        state.update(chunk)
    return state.hexdigest()


def _download(partial: Path, ref: Ref, chunks: Iterable[bytes], where: str) -> None:
    """Write the content in place of the reserved one; refuse it if its digest is another."""
    found, size = hashlib.sha256(), 0
    with partial.open("r+b") as file:
        for chunk in chunks:
            found.update(chunk)
            size += len(chunk)
            if size > ref.bytes:
                break
            file.write(chunk)
    if size != ref.bytes or found.hexdigest() != ref.sha256:
        shown = f"has {size} bytes instead of {ref.bytes}" if size < ref.bytes else "is damaged"
        raise DamagedError(where, f"{shown}; redo its step with --force")


def _named(home: Path, name: str) -> Path:
    """A hard link to the content with the name that readers expect."""
    path, content = home / "named" / name, home / CONTENT
    if stamp(path) == stamp(content):
        return path
    path.parent.mkdir(exist_ok=True)
    temporary = home / f".{uuid4().hex}"
    os.link(content, temporary)
    put_in_place(temporary, path)
    temporary.unlink(missing_ok=True)  # a rename between two links of one file does nothing
    return path


def _bytes_of(home: Path) -> int:
    """Bytes that a file takes, or will take when it is downloaded."""
    return sum(found.bytes for name in (CONTENT, PARTIAL) if (found := stamp(home / name)))


def _in_use(text: str) -> set[str]:
    """The digests of a file in `.pins`: the last line of each one counts."""
    last = {line[1:]: line[0] for line in text.splitlines() if line}
    return {sha256 for sha256, sign in last.items() if sign == "+"}


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)


@contextmanager
def _locked(path: Path, kind: int) -> Iterator[None]:
    handle = _open(path)
    try:
        flock(handle, kind)
        yield
    finally:
        os.close(handle)
