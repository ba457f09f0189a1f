"""Votes in memory: rows of a votes file, all predictions of an item, a checked file."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from components.certify.header import VotesHeader
from components.core.digests import canonical_json, digest_bytes

VOTES_NAME = "votes.parquet"
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


@dataclass(frozen=True, slots=True)
class Votes:
    """A checked votes file: header, rows sorted by (item, stream, start), SHA-256 of its bytes."""

    header: VotesHeader
    table: pa.Table
    sha256: str

    def items(self) -> Iterator[ItemVotes]:
        """All items, sorted by item id."""
        for item_id, rows in groupby(rows_of(self.table), key=lambda row: row.item_id):
            streams: dict[str, list[NDArray[np.uint16]]] = {}
            for row in rows:
                streams.setdefault(row.stream, []).append(row.predictions)
            joined = {stream: np.concatenate(parts) for stream, parts in streams.items()}
            yield ItemVotes(item_id, row.label, row.image_sha256, joined)


def image_digest(image: Tensor) -> str:
    """SHA-256 of a stored uint8 image: its shape and raw bytes."""
    if image.dtype != torch.uint8:
        raise ValueError(f"the digest is of stored uint8 pixels, got {image.dtype}")
    shape = canonical_json(list(image.shape)).encode()
    return digest_bytes(shape, image.detach().cpu().contiguous().numpy().tobytes())


def rows_of(table: pa.Table) -> Iterator[VoteRow]:
    """Rows whose predictions are views into the table: nothing is copied."""
    for batch in table.to_batches():
        lists = batch.column("predictions")
        offsets, values = lists.offsets.to_numpy(), lists.values.to_numpy()
        plain = batch.drop_columns("predictions").to_pylist()
        for fields, low, high in zip(plain, offsets[:-1], offsets[1:], strict=True):
            yield VoteRow(**fields, predictions=values[low:high])
