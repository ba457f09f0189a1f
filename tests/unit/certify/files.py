"""A votes file as the first version wrote it: without checks, with one call of Parquet's writer."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from components.certify.vote_rows import SCHEMA
from components.core.digests import canonical_json


def table_of(rows):
    columns = {name: [getattr(row, name) for row in rows] for name in SCHEMA.names}
    return pa.table(columns, SCHEMA)


def write_unchecked(path: Path, rows, header) -> None:
    """Sorted rows, as they are."""
    table = table_of(sorted(rows, key=lambda row: (row.item_id, row.stream, row.start)))
    pq.write_table(
        table.replace_schema_metadata({b"casemate": canonical_json(header)}), path,
        version="2.6", compression="zstd", row_group_size=65536, write_page_checksum=True,
    )  # fmt: skip
