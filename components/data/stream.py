"""Reading the prepared format with bounded memory: rows by position, from a few shards at a time.

Free of torch, like `shards.py`: workers that only read pixels start quickly.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from components.core.documents import parse_json
from components.core.errors import CasemateError
from components.core.folders import Folder, is_below, read_bytes
from components.data.encodings import PNG, Encoding
from components.data.shards import FORMAT
from components.data.sources.base import Pixels


class StoredShard(NamedTuple):
    """One file listed in dataset.json."""

    file: str
    sha256: str
    num_items: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Some items of one split, decoded."""

    item_ids: list[str]
    images: Pixels  # (N, C, H, W)
    labels: NDArray[np.int64]  # (N,)


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """Some items of one split, as they are stored."""

    item_ids: list[str]
    contents: list[bytes]
    labels: NDArray[np.int64]  # (N,)


def read_document(path: Path) -> dict[str, Any]:
    """Parsed dataset.json; raises an error if it is missing or has another format."""
    if not path.is_file():
        raise CasemateError("dataset", path, "is missing; run the prepare stage to its end")
    try:
        document: dict[str, Any] = parse_json(path.read_bytes())
    except ValueError as error:
        raise CasemateError("dataset", path, f"is not JSON ({error}); prepare again") from error
    found = document.get("format") if isinstance(document, dict) else None
    if found != FORMAT:
        remedy = f"has the format {found}, this version reads {FORMAT}; prepare again"
        raise CasemateError("dataset", path, remedy)
    return document


def stored_shards(document: Mapping[str, Any], split: str) -> tuple[StoredShard, ...]:
    """The files of one split, in stored order."""
    splits = document["splits"]
    if split not in splits:
        raise CasemateError("split", split, f"is not one of {', '.join(splits)}")
    shards = tuple(StoredShard(**shard) for shard in splits[split]["shards"])
    if odd := [shard.file for shard in shards if not is_below(shard.file)]:
        raise CasemateError("dataset", odd[0], "is not below its folder; prepare again")
    return shards


def stored_encoding(document: Mapping[str, Any], split: str) -> Encoding:
    """How the images of a split are stored."""
    return Encoding.described(document["splits"][split].get("encoding"))


def read_shard(folder: Folder, shard: StoredShard, *, verified: bool = False) -> pa.Table:
    """Ids, encoded images and labels of one file; `verified` skips the checksum."""
    path = f"{folder}/{shard.file}"
    try:
        content = read_bytes(folder, shard.file)
    except (FileNotFoundError, KeyError) as error:
        raise CasemateError("dataset", path, "is missing; prepare again") from error
    found = shard.sha256 if verified else hashlib.sha256(content).hexdigest()
    if found != shard.sha256:
        remedy = (
            f"is damaged or replaced: sha256 {found[:12]}, not {shard.sha256[:12]}; prepare again"
        )
        raise CasemateError("dataset", path, remedy)
    with _named_damage(path):
        file = pq.ParquetFile(pa.BufferReader(content))  # read_table would load 90 MB of libraries
        table = file.read(columns=["item_id", "image", "label"], use_threads=False)
    if table.num_rows != shard.num_items:
        remedy = f"holds {table.num_rows} items, not {shard.num_items}; prepare again"
        raise CasemateError("dataset", path, remedy)
    return table


@contextmanager
def _named_damage(path: object) -> Iterator[None]:
    """Errors of pyarrow become one that names the shard."""
    try:
        yield
    except (pa.ArrowException, OSError, KeyError) as error:
        raise CasemateError("dataset", path, f"is damaged: {error}; prepare again") from error


def read_listing(folder: Folder, shards: Sequence[StoredShard]) -> tuple[list[str], list[int]]:
    """Ids and labels of all items, in stored order; images are neither read nor checked."""
    item_ids: list[str] = []
    labels: list[int] = []
    for shard in shards:
        path = folder / shard.file
        if not path.is_file():
            raise CasemateError("dataset", path, "is missing; prepare again")
        with _named_damage(path):
            table = pq.ParquetFile(path).read(columns=["item_id", "label"], use_threads=False)
        item_ids += table.column("item_id").to_pylist()
        labels += table.column("label").to_pylist()
    return item_ids, labels


class ShardReader:
    """Rows of one split by position; an LRU cache holds at most `cache_shards` files.

    The cache holds encoded files and only requested rows are decoded: one of eight workers decodes
    an eighth of the rows. Each file is checksummed when it is first read. Safe to call from several
    threads, which read different files at the same time and none twice. `verified` are the numbers
    of files that were checked before.
    """

    def __init__(
        self,
        folder: Folder,
        shards: Sequence[StoredShard],
        *,
        image_shape: tuple[int, int, int],
        cache_shards: int,
        encoding: Encoding = PNG,
        verified: set[int] | None = None,
    ) -> None:
        if cache_shards < 1:
            raise ValueError(f"cache_shards must be >= 1, got {cache_shards}")
        self.folder, self.shards, self.image_shape = folder, tuple(shards), image_shape
        self.cache_shards, self.encoding = cache_shards, encoding
        self._ends = np.cumsum([shard.num_items for shard in shards], dtype=np.int64)
        self._tables: OrderedDict[int, Future[pa.Table]] = OrderedDict()
        self.verified = set() if verified is None else verified
        self._lock = Lock()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def numbers(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of the file of each position."""
        return np.searchsorted(self._ends, positions, side="right")

    def rows(self, positions: NDArray[np.int64]) -> Rows:
        """The items at `positions`, in that order; reads no other file and decodes no other row."""
        images = self._empty(len(positions))

        def put(place: int, content: bytes, item_id: str) -> None:
            images[place] = self._decoded(content, item_id)

        item_ids, labels = self._each(positions, put)
        return Rows(item_ids, images, labels)

    def encoded(self, positions: NDArray[np.int64]) -> EncodedRows:
        """The same, not decoded."""
        contents = [b""] * len(positions)

        def put(place: int, content: bytes, _: str) -> None:
            contents[place] = content

        item_ids, labels = self._each(positions, put)
        return EncodedRows(item_ids, contents, labels)

    def _each(
        self, positions: NDArray[np.int64], put: Callable[[int, bytes, str], None]
    ) -> tuple[list[str], NDArray[np.int64]]:
        """Ids and labels of the items; `put` gets the place, bytes and id of each."""
        if len(positions) and not 0 <= positions.min() <= positions.max() < len(self):
            raise IndexError(f"positions outside 0..{len(self) - 1}")
        labels = np.empty(len(positions), dtype=np.int64)
        item_ids = [""] * len(positions)
        numbers = self.numbers(positions)
        for number in dict.fromkeys(numbers.tolist()):  # in order of first use, for cache locality
            table = self._table(number)
            (places,) = np.nonzero(numbers == number)
            within = positions[places] - (self._ends[number] - self.shards[number].num_items)
            ids, encoded = table.column("item_id"), table.column("image")
            for place, row in zip(places.tolist(), within.tolist(), strict=True):
                item_ids[place] = ids[row].as_py()
                put(place, encoded[row].as_py(), item_ids[place])
            labels[places] = table.column("label").to_numpy()[within]
            self._used(number, len(places))
        return item_ids, labels

    def _decoded(self, content: bytes, item_id: str) -> Pixels:
        """One image (C, H, W); an error if it is not one of the dataset's shape."""
        try:
            channels, height, width = self.image_shape
            sides = {"height": height, "width": width}
            image = self.encoding.decode(content, channels=channels, **sides).transpose(2, 0, 1)
            found = "x".join(map(str, image.shape))
        except Exception as error:  # decoders raise many types for damaged files
            found, image = f"unreadable ({error})", np.empty(0, np.uint8)
        if image.shape != self.image_shape:
            shape = "x".join(map(str, self.image_shape))
            remedy = f"is {found}, not the {shape} of its dataset; prepare again"
            raise CasemateError("dataset", f"{self.folder}: {item_id}", remedy)
        return image

    def _table(self, number: int) -> pa.Table:
        with self._lock:
            coming = self._tables.get(number)
            if coming is not None:  # another thread may be reading it
                self._tables.move_to_end(number)
            else:
                self._make_room()
                own = self._tables[number] = Future()
        return self._read(number, own) if coming is None else coming.result()

    def _read(self, number: int, coming: "Future[pa.Table]") -> pa.Table:
        try:
            verified = number in self.verified
            table = read_shard(self.folder, self.shards[number], verified=verified)
        except BaseException as error:
            with self._lock:  # the next thread tries again
                if self._tables.get(number) is coming:
                    del self._tables[number]
            coming.set_exception(error)
            raise
        self.verified.add(number)
        coming.set_result(table)
        return table

    def _empty(self, num_images: int) -> Pixels:
        """Room for images, (N, C, H, W)."""
        return np.empty((num_images, *self.image_shape), dtype=np.uint8)

    def _make_room(self) -> None:
        """Drop the least recent files before one is read, to limit the peak."""
        while len(self._tables) >= self.cache_shards:
            self._tables.popitem(last=False)

    def _used(self, number: int, count: int) -> None:
        """Called after `count` rows of a file were decoded."""
