"""Votes: rows of a votes file, all predictions of an item, a checked file."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Protocol

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from components.certify.header import VotesHeader
from components.core.digests import canonical_json, digest_bytes

VOTES_NAME = "votes.parquet"
HELD_PREDICTIONS = 2**21  # in memory at once, of a file of any size
HELD_ITEMS = 4096  # certified at once: their counts are (items, classes)
ITEM_COLUMNS = [("item_id", pa.string()), ("label", pa.int32()), ("image_sha256", pa.string())]
SCHEMA = pa.schema(
    [
        *ITEM_COLUMNS,
        ("stream", pa.string()),
        ("start", pa.int32()),
        ("stop", pa.int32()),
        ("predictions", pa.list_(pa.uint16())),
    ]
)


@dataclass(frozen=True, slots=True)
class VoteRow:
    """Predictions of one block of one item."""

    item_id: str
    label: int
    image_sha256: str
    stream: str  # the kind of ablation, "pairs", or "select" and "estimate"
    start: int
    stop: int
    predictions: NDArray[np.uint16]  # (stop - start,)


@dataclass(frozen=True, slots=True)
class ItemVotes:
    """All predictions of one item, one array per stream, in the order of draws or ablations."""

    item_id: str
    label: int
    image_sha256: str
    streams: Mapping[str, NDArray[np.uint16]]


class RowSource(Protocol):
    """Where rows are: a `pa.Table`, or a file that is read batch by batch."""

    def to_batches(self) -> Iterable[pa.RecordBatch]:
        """Rows sorted by (item, stream, start), with the columns of SCHEMA."""


@dataclass(frozen=True, slots=True)
class Votes:
    """Checked votes: header, rows sorted by (item, stream, start), SHA-256 of their file."""

    header: VotesHeader
    source: RowSource
    sha256: str

    def rows(self) -> Iterator[VoteRow]:
        """All rows; those of a large file are read anew with every call."""
        return rows_of(self.source)

    def items(self) -> Iterator[ItemVotes]:
        """All items, sorted by item id."""
        for item_id, rows in groupby(self.rows(), key=lambda row: row.item_id):
            streams: dict[str, list[NDArray[np.uint16]]] = {}
            for row in rows:
                streams.setdefault(row.stream, []).append(row.predictions)
            joined = {stream: np.concatenate(parts) for stream, parts in streams.items()}
            yield ItemVotes(item_id, row.label, row.image_sha256, joined)

    def some_items(self) -> Iterator[list[ItemVotes]]:
        """All items, sorted by item id, a bounded number of predictions at a time."""
        held: list[ItemVotes] = []
        size = 0
        for item in self.items():
            own = sum(map(len, item.streams.values()))
            if len(held) == HELD_ITEMS or (held and size + own > HELD_PREDICTIONS):
                yield held
                held, size = [], 0
            held.append(item)
            size += own
        yield held


def image_digest(image: Tensor) -> str:
    """SHA-256 of a stored uint8 image: its shape and raw bytes."""
    if image.dtype != torch.uint8:
        raise ValueError(f"the digest is of stored uint8 pixels, got {image.dtype}")
    shape = canonical_json(list(image.shape)).encode()
    return digest_bytes(shape, image.detach().cpu().contiguous().numpy().tobytes())


def rows_of(source: RowSource) -> Iterator[VoteRow]:
    """Rows whose predictions are views: nothing is copied."""
    for batch in source.to_batches():
        yield from _rows_of_batch(batch)


def _rows_of_batch(batch: pa.RecordBatch) -> Iterator[VoteRow]:
    *plain, lists = (batch[name] for name in SCHEMA.names)
    offsets, values = lists.offsets.to_numpy().tolist(), lists.values.to_numpy()
    predictions = (values[low:high] for low, high in pairwise(offsets))
    yield from map(VoteRow, *(column.to_pylist() for column in plain), predictions)
