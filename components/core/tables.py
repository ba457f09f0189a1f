"""Parquet files: equal tables give equal bytes, and damaged files are named."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from components.core.errors import CasemateError
from components.core.files import atomic

ROW_GROUP_ROWS = 65_536
OPTIONS: dict[str, Any] = {"version": "2.6", "compression": "zstd", "write_page_checksum": True}


def schema_of(columns: str) -> pa.Schema:
    """Columns as `name: type`, separated by commas, with Arrow's names of types."""
    pairs = (column.split(":") for column in columns.split(","))
    return pa.schema([(name.strip(), pa.type_for_alias(kind.strip())) for name, kind in pairs])


@contextmanager
def named_damage(path: Path) -> Iterator[None]:
    """Errors of a reader become one that names the file: missing, truncated, bad checksum."""
    if not path.is_file():
        raise CasemateError("file", path, "does not exist")
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise CasemateError("file", path, f"is truncated or damaged: {error}") from error


def open_table(path: Path) -> pq.ParquetFile:
    """A Parquet file to read; call it, and what reads from it, inside `named_damage`."""
    return pq.ParquetFile(path, page_checksum_verification=True)


def read_table(path: Path, *, max_rows: int | None = None) -> pa.Table:
    """A Parquet table, or an error that names the file: missing, truncated, bad checksum.

    `max_rows` refuses a longer table before it is read: a few bytes may stand for millions of rows.
    """
    with named_damage(path):
        file = open_table(path)
        if max_rows is not None and file.metadata.num_rows > max_rows:
            remedy = f"has {file.metadata.num_rows:,} rows, not {max_rows:,}"
            raise CasemateError("file", path, remedy)
        return file.read()


def write_table(path: Path, table: pa.Table) -> None:
    """Write a Parquet file; all options that affect the bytes are fixed here."""
    with atomic(path) as temporary:
        pq.write_table(table, temporary, row_group_size=ROW_GROUP_ROWS, **OPTIONS)


@contextmanager
def table_writer(path: Path, schema: pa.Schema) -> Iterator[pq.ParquetWriter]:
    """Write a Parquet file table by table: each is a row group, or several of ROW_GROUP_ROWS.

    The file appears when the block ends without an error.
    """
    with atomic(path) as temporary, pq.ParquetWriter(temporary, schema, **OPTIONS) as writer:
        yield writer
