"""Where a dataset's files are: paths of this machine, or objects below a URI.

`RemotePath` has the methods of `pathlib.Path` that sources use, so that a source is written once.
Nothing is copied to disk. A listing holds the names of one folder; a file is read whole where the
caller asks for all of it (one image, labels), else by ranges of at most `WINDOW` bytes at a time
or of the length that the caller asks for.
"""

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, cast

from components.core.errors import CasemateError
from components.core.object_stores import (
    FIRST,
    LONG,
    QUICK,
    is_uri,
    open_bucket,
    remedy_of,
    uri_problem,
)

WINDOW = 2**20  # bytes that a buffered file reads ahead
KEY = "data.path"


@dataclass(frozen=True, slots=True)
class ObjectFacts:
    """What a listing says about one object."""

    size: int
    tag: str  # changes with the content: the entity tag, or the time of the last change

    @property
    def version(self) -> str:
        return f"{self.size}-{self.tag}"

    @staticmethod
    def of(meta: Any) -> "ObjectFacts":
        tag = meta["e_tag"] or f"{meta['last_modified'].timestamp():.0f}"
        return ObjectFacts(int(meta["size"]), tag)


@dataclass(frozen=True, slots=True)
class RemotePath:
    """One object, or all objects below a prefix; read-only."""

    bucket: str  # with its scheme
    key: str  # without slashes at its ends; empty: the whole bucket
    facts: ObjectFacts | None = field(default=None, compare=False, repr=False)  # of an object
    listed: bool = field(default=False, compare=False, repr=False)  # known to be there

    @staticmethod
    def parse(uri: str) -> "RemotePath":
        if problem := uri_problem(uri):
            raise CasemateError(KEY, uri, problem)
        scheme, _, rest = uri.partition("://")
        bucket, _, key = rest.rstrip("/").partition("/")
        return RemotePath(f"{scheme}://{bucket}", key)

    def __str__(self) -> str:
        return f"{self.bucket}/{self.key}" if self.key else self.bucket

    def __truediv__(self, name: str) -> "RemotePath":
        if not name:
            return self
        return RemotePath(self.bucket, f"{self.key}/{name}" if self.key else name)

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> "RemotePath":
        return RemotePath(self.bucket, self.key.rpartition("/")[0])

    def relative_to(self, above: "RemotePath") -> PurePosixPath:
        return PurePosixPath(self.key).relative_to(above.key)

    def stat_object(self) -> ObjectFacts | None:
        """Size and tag; None if the object does not exist."""
        if self.listed:
            return self.facts
        if not self.key:
            return None
        with self._errors():
            try:
                return ObjectFacts.of(open_bucket(self.bucket, FIRST).head(self.key))
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise
                return None

    def is_file(self) -> bool:
        return self.stat_object() is not None

    def is_dir(self) -> bool:
        """Whether there are objects below; an empty folder does not exist."""
        if self.listed:
            return self.facts is None
        return next(self._below(), None) is not None

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def iterdir(self) -> Iterator["RemotePath"]:
        """Folders and objects directly below."""
        with self._errors():
            found = self._store().list_with_delimiter(self.key or None)
        for key in found["common_prefixes"]:
            yield RemotePath(self.bucket, key, listed=True)
        yield from map(self._object, found["objects"])

    def rglob(self, pattern: str) -> Iterator["RemotePath"]:
        """Objects at any depth below whose name fits; folders are not listed."""
        return (path for path in self._below() if fnmatch(path.name, pattern))

    def read_bytes(self) -> bytes:
        with self._errors():
            return bytes(self._store().get(self.key).bytes())

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def open(self, mode: str = "rb", *, window: int = WINDOW) -> io.BufferedReader:
        """A seekable file that reads ranges; an error if the object changes while it is read."""
        assert mode == "rb", "objects are read-only"
        facts = self.stat_object()
        if facts is None:
            raise missing(self)
        version = facts.version
        return buffered(
            lambda start, length: self.read_range(start, length, version),
            0,
            facts.size,
            window=window,
        )

    def read_range(self, start: int, length: int, version: str) -> bytes:
        """`length` bytes of the object as it was listed."""
        with self._errors():
            options = {"range": (start, start + length)}
            answer = self._store().get(self.key, options=options)
            content = bytes(answer.bytes())
        if ObjectFacts.of(answer.meta).version != version:
            raise changed(self)
        if len(content) != length:
            remedy = f"gave {len(content)} of {length} bytes at {start}; upload it again"
            raise CasemateError(KEY, self, remedy)
        return content

    def check_reachable(self) -> None:
        """Raise an error unless there is something here; gives up after a few seconds."""
        with self._errors():
            store = open_bucket(self.bucket, QUICK)
            pages = store.list(self.key or None, chunk_size=1)
            if any(page for page in pages):
                return
            if not self.key:
                raise missing(self)
            store.head(self.key)  # the error of a missing object is that of an empty prefix

    def _below(self) -> Iterator["RemotePath"]:
        """All objects below; only a page of them is held."""
        with self._errors():
            for page in self._store().list(self.key or None):
                yield from map(self._object, page)

    def _object(self, meta: Any) -> "RemotePath":
        return RemotePath(self.bucket, meta["path"], ObjectFacts.of(meta), listed=True)

    def _store(self) -> Any:
        return open_bucket(self.bucket, LONG)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Errors of the store in one line; never skipped, because the item may be intact."""
        from obstore.exceptions import BaseError

        try:
            yield
        except FileNotFoundError as error:  # obstore raises Python's own, for buckets too
            if "NoSuchBucket" not in str(error):
                raise missing(self) from error
            raise _unreadable(self, error) from error
        except BaseError as error:
            raise _unreadable(self, error) from error


Place = Path | RemotePath


def place_of(path: str) -> Place:
    """The path, absolute because workers run elsewhere, or the place of a URI."""
    if problem := uri_problem(path):
        raise CasemateError(KEY, path, problem)
    return RemotePath.parse(path) if is_uri(path) else Path(path).expanduser().absolute()


def below(place: Place, root: Place) -> PurePath:
    """The path of a place relative to one above it, both of one kind."""
    found: PurePath = place.relative_to(root)  # type: ignore[arg-type]
    return found


def missing(place: Place) -> CasemateError:
    """Error for a place with nothing in it."""
    remedy = "does not exist"
    if isinstance(place, RemotePath):
        remedy = "holds no objects; correct the URI or upload the files there"
    return CasemateError(KEY, place, remedy)


def changed(place: Place) -> CasemateError:
    """Error for a file that is not as it was listed."""
    return CasemateError(KEY, place, "changed while it was read; start again")


def _unreadable(place: RemotePath, error: BaseException) -> CasemateError:
    return CasemateError(KEY, place, remedy_of(error)[0])


class _Part(io.RawIOBase):
    """A part of a file as a file; each read is one range."""

    def __init__(self, read: Callable[[int, int], bytes], start: int, length: int) -> None:
        super().__init__()
        self._read, self._start, self._length, self._at = read, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        length = max(0, min(len(view), self._length - self._at))
        if length:
            view[:length] = self._read(self._start + self._at, length)
            self._at += length
        return length


def buffered(
    read: Callable[[int, int], bytes], start: int, length: int, *, window: int = WINDOW
) -> io.BufferedReader:
    """The bytes that `read(start, length)` gives as a file that holds `window` of them."""
    return io.BufferedReader(cast(io.RawIOBase, _Part(read, start, length)), buffer_size=window)
