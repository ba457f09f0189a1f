"""All durable I/O: one store over a folder or a bucket, in which keys are created once.

Every claim rests on one promise of the storage: of several writers that create one key, one wins,
and readers see its whole content or nothing. No argument relies on renaming, on file locks or on
the order of listings. Files are named by their content, so two writers never meet on a key with
different bytes; only a file whose bytes were damaged is written again under its name.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from uuid import uuid4

from components.core.digests import digest_file
from components.core.folders import is_below
from components.core.object_stores import uri_problem
from pipelines.runtime.bucket_backend import BucketBackend
from pipelines.runtime.folder_backend import FolderBackend
from pipelines.runtime.manifests import is_content
from pipelines.runtime.node_cache import (
    CheckedFiles,
    NodeCache,
    Ref,
    default_folder,
    default_limit,
    digest_chunks,
)
from pipelines.runtime.store_errors import DamagedError, MissingError, StoreError, missing

__all__ = ["DamagedError", "Listed", "MissingError", "Ref", "Store", "StoreError", "open_store"]

FILES = "files"  # of a step, below it by digest
CONFLICT_PAUSES = (0.0, 0.1, 0.3, 1.0, 3.0)  # seconds until a conflicting write must be readable


@dataclass(frozen=True, slots=True)
class Listed:
    """A key in a listing; `modified` is by the clock of the storage."""

    key: str
    bytes: int
    modified: float


class Store:
    """A folder, or a bucket with a prefix; another process opens it again by its root."""

    def __init__(
        self,
        root: str | Path,
        *,
        cache_folder: Path | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        text = str(root)
        self.is_local = ":/" not in text
        self.root = str(Path(text).absolute()) if self.is_local else _checked_url(text)
        self.cache = NodeCache(cache_folder, cache_bytes)
        self._checked = CheckedFiles()
        self._clock_skew: float | None = None
        self._backend: FolderBackend | BucketBackend
        if self.is_local:
            self._backend = FolderBackend(Path(self.root))
        else:
            self._backend = BucketBackend(self.root)

    def __repr__(self) -> str:
        return f"Store({self.root!r})"

    def __reduce__(self) -> tuple[object, ...]:
        answered = isinstance(self._backend, BucketBackend) and self._backend.answered
        # The defaults of a machine are its own: another one may have its cache elsewhere.
        folder = None if self.cache.folder == default_folder() else self.cache.folder
        limit = None if self.cache.limit == default_limit() else self.cache.limit
        return _reopen, (self.root, folder, limit, answered, self._clock_skew)

    def where(self, key: str) -> str:
        """The key as a path or URL, for messages."""
        return f"{self.root}/{key}"

    def put_new(self, key: str, content: bytes) -> bool:
        """Create a key. True: it holds this content; False: another content was first.

        "It exists" is not an answer: a write whose reply was lost is sent again by obstore and
        meets itself, and S3 reports a conflict while the other write is not yet readable. So the
        content is compared. A caller that must tell itself from its twin adds a random token.
        """
        _check(key)
        for pause in CONFLICT_PAUSES:
            time.sleep(pause)
            if self._backend.create(key, content):
                return True
            there = self._backend.get(key)
            if there is not None:
                return there == content
        raise StoreError(self.where(key), "can be neither created nor read; run the command again")

    def put_same(self, key: str, content: bytes) -> None:
        """Create a key, or find this content there; another content is an error."""
        if not self.put_new(key, content):
            remedy = "exists with other content; delete it, or redo its step with --force"
            raise DamagedError(self.where(key), remedy)

    def put_file(self, folder: str, name: str, path: Path) -> Ref:
        """Store a file under the name of its content; on a folder as a hard link if possible.

        The file must not be changed afterwards. A damaged key of this name is mended.
        """
        sha256 = digest_file(path)
        ref = Ref(f"{folder}/{FILES}/{sha256[:20]}/{name}", sha256, path.stat().st_size)
        _check(ref.key)
        if not self._backend.create_from(ref.key, path) and not self._holds(ref):
            self._backend.replace_from(ref.key, path)
        return ref

    def _holds(self, ref: Ref) -> bool:
        """Whether the key of a file has its content."""
        try:
            return digest_chunks(self._backend.chunks(ref.key)) == ref.sha256
        except MissingError:
            return False

    def get(self, key: str) -> bytes:
        """The content of a key, which must exist."""
        content = self.find(key)
        if content is None:
            raise missing(self.where(key))
        return content

    def find(self, key: str) -> bytes | None:
        """The content of a key; None if the key does not exist."""
        _check(key)
        return self._backend.get(key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Bytes of a key; fewer than `length` at its end."""
        _check(key)
        return self._backend.get_range(key, start, length)

    def listing(self, prefix: str) -> list[Listed]:
        """Keys below a folder-like prefix, sorted; all keys for an empty one."""
        return sorted(
            (Listed(*entry) for entry in self._backend.listing(prefix.strip("/"))),
            key=lambda listed: listed.key,
        )

    def delete(self, keys: Sequence[str]) -> None:
        """Remove keys; missing ones are fine."""
        for key in keys:
            _check(key, hidden=True)  # Ray writes such keys to a bucket
        self._backend.delete(keys)

    def local(self, ref: Ref) -> Path:
        """A path on this node with the file's content, checked against its digest.

        For a folder it is the file itself, else a copy in the cache of this node.
        """
        if not (is_below(ref.key) and is_content(ref.sha256, ref.bytes)):
            raise DamagedError(self.root, f"names a file that no step stores: {ref.key}")
        if isinstance(self._backend, FolderBackend):
            path = self._backend.path(ref.key)
            if not self._checked.holds(path, ref):
                raise DamagedError(path, "is missing or changed; redo its step with --force")
            return path
        return self.cache.path(ref, self._backend.chunks, where=self.where(ref.key))

    @property
    def clock_skew(self) -> float:
        """Seconds that the clock of the storage is ahead of ours; measured once."""
        if self._clock_skew is None:
            self.check_create_only()
        assert self._clock_skew is not None
        return self._clock_skew

    def check_create_only(self) -> None:
        """Write a key twice: refuse a storage that overwrites. Measure its clock, tidy up."""
        key = f"probes/{uuid4().hex}"
        first, now = self.put_new(key, b"first"), time.time()
        second = self.put_new(key, b"second")
        kept = self.get(key)
        self._clock_skew = self._backend.modified(key) - now
        self.delete([key])
        self._backend.sweep()
        if not first or second or kept != b"first":
            raise StoreError(
                self.root,
                "overwrites a key that it was asked to create only, so two runs would damage each"
                " other; use another store, or a folder",
            )


def open_store(
    root: str | Path, *, cache_folder: Path | None = None, cache_bytes: int | None = None
) -> Store:
    """The store of a folder or URL; one per process, which keeps the files in use on this node.

    The cache defaults to the environment's: see `NodeCache`.
    """
    text = str(root) if ":/" in str(root) else str(Path(root).absolute())
    return _opened(text, cache_folder or default_folder(), cache_bytes or default_limit())


@cache
def _opened(root: str, cache_folder: Path, cache_bytes: int) -> Store:
    return Store(root, cache_folder=cache_folder, cache_bytes=cache_bytes)


def _reopen(
    root: str,
    cache_folder: Path | None,
    cache_bytes: int | None,
    answered: bool,
    clock_skew: float | None,
) -> Store:
    """The store of this process for one that was pickled in another."""
    store = open_store(root, cache_folder=cache_folder, cache_bytes=cache_bytes)
    if isinstance(store._backend, BucketBackend):
        store._backend.answered |= answered
    if store._clock_skew is None:
        store._clock_skew = clock_skew
    return store


def _checked_url(text: str) -> str:
    """A URL without a slash at its end, of a bucket; a `Path` of a URL has lost a slash."""
    if remedy := uri_problem(text):
        raise StoreError(text, remedy)
    return text.rstrip("/")


def _check(key: str, *, hidden: bool = False) -> None:
    """A key is a relative path without empty, hidden or upward parts."""
    parts = key.split("/")
    if not is_below(key) or (not hidden and any(part.startswith(".") for part in parts)):
        raise ValueError(f"not a key of a store: {key!r}")
