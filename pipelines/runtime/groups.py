"""Results of many units in one object: Arrow streams, and at the end what they hold.

    stream | stream | ... | about | briefs | trailer

A stream is one compressed record batch with the tables of all units of one schema, one after the
other; usually there is one. `about` says whose result it is, which units and how many rows each;
`briefs` is what the driver needs of each result. The trailer has the lengths of both, a digest of
them and a magic word, so that a resumed step reads the end of an object only.
"""

import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

MAGIC = b"casemate-group-1"
TRAILER = struct.Struct("<QQ32s16s")
END_BYTES = 65_536  # of an object that are read first; a longer end is read again
OPTIONS = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=3))

ReadRange = Callable[[int, int], bytes]  # start, length -> content


class GroupError(ValueError):
    """An object that is not a whole group; the text continues the sentence "it is damaged"."""


def pack(
    units: Sequence[str],
    tables: Sequence[pa.Table],
    *,
    run_id: str,
    briefs: Sequence[Any] | None = None,
) -> bytes:
    """The content of a group; briefs are JSON values."""
    plain = [table.replace_schema_metadata(None) for table in tables]
    schemas: dict[bytes, int] = {}
    stream_of = [
        schemas.setdefault(table.schema.serialize().to_pybytes(), len(schemas)) for table in plain
    ]
    streams = [
        _stream([table for table, own in zip(plain, stream_of, strict=True) if own == number])
        for number in range(len(schemas))
    ]
    about = _packed(
        {
            "run_id": run_id,
            "units": list(units),
            "rows": [table.num_rows for table in plain],
            "streams": [len(stream) for stream in streams],
            "stream_of": stream_of if len(streams) > 1 else None,
        }
    )
    notes = b"" if briefs is None else _packed(list(briefs))
    end = TRAILER.pack(len(about), len(notes), hashlib.sha256(about + notes).digest(), MAGIC)
    return b"".join([*streams, about, notes, end])


def _stream(tables: Sequence[pa.Table]) -> bytes:
    whole = pa.concat_tables(tables).combine_chunks()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, whole.schema, options=OPTIONS) as writer:
        writer.write_table(whole)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _packed(value: object) -> bytes:
    return zlib.compress(json.dumps(value, separators=(",", ":"), allow_nan=False).encode())


@dataclass(frozen=True)
class End:
    """What the end of a group says."""

    run_id: str
    units: tuple[str, ...]
    rows: tuple[int, ...]
    streams: tuple[int, ...]  # their lengths in bytes
    stream_of: tuple[int, ...]  # of every unit
    notes: bytes  # briefs, still compressed: of all groups of a step they would fill the memory

    @cached_property
    def places(self) -> dict[str, int]:
        """Units by name."""
        return {name: place for place, name in enumerate(self.units)}

    def briefs(self) -> list[Any] | None:
        """What was noted of each unit; None for a group without notes."""
        if not self.notes:
            return None
        found: list[Any] = json.loads(zlib.decompress(self.notes))
        return found


def read_end(read: ReadRange, size: int) -> End:
    """The end of an object of `size` bytes, in one read or two."""
    tail = read(max(0, size - END_BYTES), min(size, END_BYTES))
    if len(tail) < TRAILER.size or tail[-len(MAGIC) :] != MAGIC:
        raise GroupError("its end is missing")
    about_bytes, note_bytes, digest, _ = TRAILER.unpack(tail[-TRAILER.size :])
    length = about_bytes + note_bytes + TRAILER.size
    if length > size:
        raise GroupError("its end is missing")
    if length > len(tail):
        tail = read(size - length, length)
    both = tail[len(tail) - length : -TRAILER.size]
    if hashlib.sha256(both).digest() != digest:
        raise GroupError("its end does not match its digest")
    about = json.loads(zlib.decompress(both[:about_bytes]))
    units = tuple(about["units"])
    return End(
        run_id=about["run_id"],
        units=units,
        rows=tuple(about["rows"]),
        streams=tuple(about["streams"]),
        stream_of=tuple(about["stream_of"] or [0] * len(units)),
        notes=both[about_bytes:],
    )


class Group:
    """A group in memory; tables are views into it."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.end = read_end(lambda start, length: content[start : start + length], len(content))

    @cached_property
    def _streams(self) -> list[pa.Table]:
        starts = np.cumsum([0, *self.end.streams])
        whole = pa.py_buffer(self.content)
        return [
            pa.ipc.open_stream(whole.slice(int(start), length)).read_all()
            for start, length in zip(starts[:-1], self.end.streams, strict=True)
        ]

    @cached_property
    def _starts(self) -> list[int]:
        """The first row of every unit in its stream."""
        reached, starts = [0] * len(self.end.streams), []
        for stream, rows in zip(self.end.stream_of, self.end.rows, strict=True):
            starts.append(reached[stream])
            reached[stream] += rows
        return starts

    def table(self, unit: str) -> pa.Table:
        """The result of one unit."""
        place = self.end.places[unit]
        stream = self._streams[self.end.stream_of[place]]
        return stream.slice(self._starts[place], self.end.rows[place])

    def __iter__(self) -> Iterator[tuple[str, pa.Table]]:
        """Units and their results, in stored order."""
        return ((unit, self.table(unit)) for unit in self.end.units)
