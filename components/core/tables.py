"""Parquet files: equal tables give equal bytes, and damaged files are named."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from components.core.errors import CasemateError
from components.core.files import atomic


def schema_of(columns: str) -> pa.Schema:
    """Columns as `name: type`, separated by commas, with Arrow's names of types."""
    pairs = (column.split(":") for column in columns.split(","))
    return pa.schema([(name.strip(), pa.type_for_alias(kind.strip())) for name, kind in pairs])


def read_table(path: Path) -> pa.Table:
    """A Parquet table, or an error that names the file: missing, truncated, bad checksum."""
    if not path.is_file():
        raise CasemateError("file", path, "does not exist")
    try:
        return pq.ParquetFile(path, page_checksum_verification=True).read()
    except (pa.ArrowException, OSError) as error:
        raise CasemateError("file", path, f"is truncated or damaged: {error}") from error


def write_table(path: Path, table: pa.Table) -> None:
    """Write a Parquet file; all options that affect the bytes are fixed here."""
    with atomic(path) as temporary:
        pq.write_table(
            table,
            temporary,
            version="2.6",
            compression="zstd",
            row_group_size=65536,
            write_page_checksum=True,
        )
