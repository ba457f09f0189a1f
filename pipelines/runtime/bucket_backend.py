"""A bucket of S3, Google Cloud or Azure as a store of keys, on obstore.

obstore repeats requests by itself for a few seconds. Behind that, a call is repeated for as long as
the storage may be down for a moment: minutes for one that has answered before, seconds for one that
has not, because its address is probably wrong.
"""

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import obstore.store
from obstore.exceptions import AlreadyExistsError, BaseError

from components.core.object_stores import check_endpoints
from pipelines.runtime.folder_backend import Entry
from pipelines.runtime.store_errors import StoreError, UnavailableError, bucket_error, missing

CHUNK = 2**23  # bytes of a piece of a download or an upload
MAX_CHUNKS = 9000  # of an upload; S3 allows 10,000
ONE_PUT = 2**26  # larger files go in parts
PATIENCE = 180.0  # seconds of waiting for a storage that answered before
FIRST_PATIENCE = 5.0  # seconds of waiting for the first answer
PAUSES = (0.2, 0.5, 1.0, 2.0, 5.0)  # seconds between tries; the last one again and again

T = TypeVar("T")


class _Runtime:
    """The threads of obstore: one set per process, which a fork does not copy."""

    is_started = False
    is_forked = False

    @classmethod
    def after_fork(cls) -> None:
        cls.is_forked = cls.is_started


os.register_at_fork(after_in_child=_Runtime.after_fork)


class BucketBackend:
    """Keys below a URL, opened at the first use."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answered = False
        """Whether the storage answered before, here or where the store came from."""
        self._raw: Any = None

    @property
    def raw(self) -> Any:
        if _Runtime.is_forked:
            remedy = "is used in a fork of a process that used it, which blocks both; spawn instead"
            raise StoreError(self.url, remedy)
        if self._raw is None:
            self._raw, _Runtime.is_started = self._open(), True
        return self._raw

    def _open(self) -> Any:
        check_endpoints()
        http = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
        try:
            return obstore.store.from_url(
                self.url,
                client_options={
                    "allow_http": http or os.environ.get("AWS_ALLOW_HTTP", "") == "true",
                    "connect_timeout": "5s",
                    "timeout": "120s",
                },
                retry_config={"max_retries": 4, "retry_timeout": timedelta(seconds=60)},
            )
        except (BaseError, ValueError) as error:
            raise bucket_error(error, self.url) from None

    def create(self, key: str, content: bytes) -> bool:
        """Create a key; False if it exists, or if another write of it is under way."""
        try:
            self._ask(lambda: self.raw.put(key, content, mode="create", use_multipart=False))
        except AlreadyExistsError:
            return False
        return True

    def create_from(self, key: str, source: Path) -> bool:
        """Create a key from a file; False if it exists. A large file replaces the key."""
        if source.stat().st_size <= ONE_PUT:
            return self.create(key, source.read_bytes())
        self.replace_from(key, source)
        return True

    def replace_from(self, key: str, source: Path) -> None:
        """Replace the content of a key by that of a file."""
        chunk = max(CHUNK, -(-source.stat().st_size // MAX_CHUNKS))
        self._ask(lambda: self.raw.put(key, source, chunk_size=chunk))

    def get(self, key: str) -> bytes | None:
        """The content of a key; None if the key does not exist."""
        try:
            return bytes(self._ask(lambda: self.raw.get(key).bytes()))
        except FileNotFoundError:
            return None

    def get_range(self, key: str, start: int, length: int) -> bytes:
        if length == 0:
            return b""
        try:
            return bytes(self._ask(lambda: self.raw.get_range(key, start=start, length=length)))
        except FileNotFoundError:
            raise missing(f"{self.url}/{key}") from None

    def chunks(self, key: str) -> Iterator[bytes]:
        """The content of a key in pieces; a download that breaks off continues where it was."""
        done = 0
        try:
            answer = self._ask(lambda: self.raw.get(key))
            size = answer.meta["size"]
            for chunk in _until_cut(answer.stream(CHUNK)):
                done += len(chunk)
                yield chunk
        except FileNotFoundError:
            raise missing(f"{self.url}/{key}") from None
        while done < size:
            chunk = self.get_range(key, done, min(CHUNK, size - done))
            done += len(chunk)
            yield chunk

    def listing(self, prefix: str) -> list[Entry]:
        """Keys below a folder-like prefix, in any order."""
        found = self._ask(lambda: [m for page in self.raw.list(prefix or None) for m in page])
        # Ray marks folders by empty keys with a slash at the end, `prefix/` among them.
        return [
            Entry(m["path"], m["size"], m["last_modified"].timestamp())
            for m in found
            if m["path"] != prefix
        ]

    def delete(self, keys: Sequence[str]) -> None:
        """Remove keys; missing ones are fine."""
        for start in range(0, len(keys), 1000):
            some = list(keys[start : start + 1000])
            try:
                self._ask(partial(self.raw.delete, some))
            except FileNotFoundError:  # some stores refuse a missing one
                self._delete_each(some)

    def _delete_each(self, keys: Sequence[str]) -> None:
        for key in keys:
            try:
                self._ask(partial(self.raw.delete, key))
            except FileNotFoundError:
                continue

    def modified(self, key: str) -> float:
        """When a key was created, by the clock of the storage."""
        try:
            when: float = self._ask(lambda: self.raw.head(key))["last_modified"].timestamp()
        except FileNotFoundError:
            raise missing(f"{self.url}/{key}") from None
        return when

    def sweep(self) -> None:
        """Nothing to do: an unfinished write leaves no key."""

    def _ask(self, call: Callable[[], T]) -> T:
        """The answer to a call; repeated while the storage is away for a moment."""
        started, tries = time.monotonic(), 0
        while True:
            try:
                answer = call()
            except AlreadyExistsError:
                self.answered = True
                raise
            except FileNotFoundError as error:  # obstore raises Python's own
                if "NoSuchBucket" in str(error):
                    raise bucket_error(error, self.url) from None
                if "performing PUT" in str(error):
                    remedy = "does not answer like a store of objects; check AWS_ENDPOINT_URL"
                    raise StoreError(self.url, remedy) from None
                self.answered = True
                raise
            except BaseError as error:
                failure = bucket_error(error, self.url)
                patience = PATIENCE if self.answered else FIRST_PATIENCE
                waited = time.monotonic() - started
                if not isinstance(failure, UnavailableError) or waited > patience:
                    raise failure from None
            else:
                self.answered = True
                return answer
            time.sleep(PAUSES[min(tries, len(PAUSES) - 1)] * random.uniform(0.5, 1.0))
            tries += 1


def _until_cut(stream: Any) -> Iterator[bytes]:
    """Pieces of a download, as far as it goes."""
    try:
        for chunk in stream:
            yield bytes(chunk)
    except BaseError:
        return
