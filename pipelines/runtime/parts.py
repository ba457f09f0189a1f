"""Durable results of work units: one checksummed Parquet part per unit, written atomically."""

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from components.core.digests import digest_bytes
from components.core.errors import CasemateError, first_line
from components.core.files import atomic

KEY = b"casemate.part"


def content_digest(table: pa.Table) -> str:
    """Digest of names, types and values: what a Parquet round trip must give back."""
    return digest_bytes(*(_column_bytes(name, table[name]) for name in table.column_names))


def _column_bytes(name: str, column: pa.ChunkedArray) -> bytes:
    """One column as Arrow streams of what can be read from it.

    Parquet renames the inside of lists and forgets what memory holds below a null, so lists go in
    pieces, and values apart from their validity.
    """
    if pa.types.is_list(column.type):
        lengths, values = pc.list_value_length(column), pc.list_flatten(column)
        return _column_bytes(f"{name}.length", lengths) + _column_bytes(f"{name}.value", values)
    if column.null_count:
        valid = pc.is_valid(column).cast(pa.uint8())
        return _column_bytes(f"{name}.valid", valid) + _column_bytes(name, pc.drop_null(column))
    whole = pa.table({name: column.combine_chunks()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, whole.schema) as writer:
        writer.write_table(whole)
    content: bytes = sink.getvalue().to_pybytes()
    return content


class PartStore:
    """The parts of one step. `run_id` is its fingerprint: a part of other work is refused."""

    def __init__(self, folder: Path, *, run_id: str) -> None:
        self.folder = folder
        self.run_id = run_id
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, unit: str) -> Path:
        return self.folder / f"{unit}.parquet"

    def has(self, unit: str) -> bool:
        """True for a finished, intact part; a damaged part or one of other work is an error."""
        return self.find(unit) is not None

    def find(self, unit: str) -> pa.Table | None:
        """A finished part, or None where there is none yet."""
        return self.load(unit) if self.path(unit).exists() else None

    def save(self, unit: str, table: pa.Table) -> None:
        """Write a part with its digest."""
        header = {"run_id": self.run_id, "unit": unit, "digest": content_digest(table)}
        with atomic(self.path(unit)) as temporary:
            pq.write_table(table.replace_schema_metadata({KEY: json.dumps(header)}), temporary)

    def load(self, unit: str) -> pa.Table:
        path = self.path(unit)
        remedy = "delete this file to compute it again, or use --force"
        try:
            table = pq.read_table(path)
            header = json.loads((table.schema.metadata or {})[KEY])
            whole = header["digest"] == content_digest(table)
        except (pa.ArrowException, OSError, KeyError, ValueError) as error:
            damage = f"is damaged ({first_line(error)})"
            raise CasemateError("part", path, f"{damage}; {remedy}") from error
        if header.get("run_id") != self.run_id or header.get("unit") != unit:
            raise CasemateError("part", path, f"belongs to other work; {remedy}")
        if not whole:
            raise CasemateError("part", path, f"does not match its own digest; {remedy}")
        return table.replace_schema_metadata(None)

    def all_tables(self) -> Iterator[pa.Table]:
        """All finished parts, in any order."""
        yield from self.tables([path.stem for path in sorted(self.folder.glob("*.parquet"))])

    def tables(self, units: list[str]) -> Iterator[pa.Table]:
        """The parts of these units, in their order."""
        for unit in units:
            yield self.load(unit)
