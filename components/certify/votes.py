"""The votes file: all single predictions, from which certificates are derived.

One row is a block: predictions of the draws (or ablations, or pairs of masks) start, ..., stop - 1
of one item and stream. The header, stored in the Parquet schema, records which model voted on
which data under which settings. Incomplete files, or files that contradict their header, are
rejected on writing and on reading. Files of any size are written, checked and read in bounded
memory.

Format 1 is a row group for every 65,536 rows. Files of more than 2^21 predictions have format 2,
recorded beside the header: a row group also ends before its predictions exceed 2^21.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from components.certify.header import VotesHeader, check_fields
from components.certify.registry import FAMILIES, family_of
from components.certify.vote_order import row_groups, sorted_rows
from components.certify.vote_rows import HELD_PREDICTIONS, SCHEMA, VoteRow, Votes, rows_of
from components.core.digests import canonical_json, digest_file
from components.core.documents import parse_json
from components.core.errors import CasemateError
from components.core.tables import ROW_GROUP_ROWS, named_damage, open_table, table_writer

HEADER_KEY = b"casemate"
FORMAT_KEY, LARGE_FORMAT = b"casemate.votes_format", b"2"
MOST_PREDICTIONS = 2**35  # in one file: 2^15 row groups, at least half full on average


def stream_sizes(header: VotesHeader) -> dict[str, int]:
    """Predictions of every item per stream; an upper bound if items may stop early."""
    return family_of(header.kind).streams(header)


def check_can_store(header: VotesHeader) -> None:
    """Reject more predictions than one file holds, before any is computed."""
    count = header.num_items * sum(stream_sizes(header).values())
    if count >= MOST_PREDICTIONS and not family_of(header.kind).may_stop(header):
        remedy = f"would make {count:,} predictions; a file holds fewer than 2^35: certify fewer"
        raise CasemateError("certify.num_items", header.num_items, remedy)


def write_votes(
    path: Path,
    parts: Iterable[pa.Table | VoteRow],
    header: Mapping[str, object],
    *,
    scratch: Path | None = None,
) -> Votes:
    """Check, sort and store the votes of a whole run; equal votes and header give equal bytes.

    `parts`: rows, or tables of them, in any order; a row that arrives twice is stored once.
    `scratch`: a folder for temporary files of the size of the votes; by default that of `path`.
    """
    plain_header = json.loads(canonical_json(header))  # tuples become lists, as after reading
    checked = read_header(plain_header, path)
    schema = SCHEMA.with_metadata({HEADER_KEY: canonical_json(checked.to_dict())})
    ordered = sorted_rows(_tables(parts, path), path=path, scratch=scratch or path.parent)
    held: list[pa.Table] = []
    count = 0
    with closing(ordered), table_writer(path, schema) as writer:
        for group in row_groups(_checked(ordered, checked, path)):
            writer.write_table(group, row_group_size=ROW_GROUP_ROWS)
            count += int(pc.sum(pc.list_value_length(group["predictions"])).as_py())
            held = [*held, group] if count <= HELD_PREDICTIONS else []
        if count > HELD_PREDICTIONS:
            writer.add_key_value_metadata({FORMAT_KEY: LARGE_FORMAT})
    return Votes(
        checked, pa.concat_tables(held) if held else StoredRows.of(path), digest_file(path)
    )


def read_votes(path: Path) -> Votes:
    """Read a votes file; an error names it unless it is complete and matches its header."""
    stored, header = _open(path)
    rows = stored if stored.num_predictions > HELD_PREDICTIONS else stored.in_memory()
    checker = _RowChecker(header, path)
    for batch in rows.to_batches():
        lists = batch["predictions"]
        if any(cells.null_count for cells in (*batch.columns, lists.values)):
            raise _refusal(path, "has empty cells")
        checker.add(pa.Table.from_batches([batch]))
    checker.finish()
    votes = Votes(header, rows, digest_file(path))
    stored.check_unchanged()
    return votes


def _open(path: Path) -> tuple["StoredRows", VotesHeader]:
    """The rows and the header of a votes file, by its metadata alone."""
    with named_damage(path):
        stored = StoredRows.of(path)
        file = open_table(path)
        schema, about = file.schema_arrow, file.metadata.metadata or {}
    raw = (schema.metadata or {}).get(HEADER_KEY)
    if raw is None or not schema.equals(SCHEMA):
        raise CasemateError("votes", path, "is not a votes file: its header or columns are missing")
    if about.get(FORMAT_KEY, LARGE_FORMAT) != LARGE_FORMAT:
        found = about[FORMAT_KEY].decode(errors="replace")
        raise _refusal(path, f"has votes format {found}; use a version that reads it")
    try:
        values = parse_json(raw)
    except ValueError as error:
        raise CasemateError("votes", path, f"has an unreadable header: {error}") from error
    return stored, read_header(values, path)


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows of a votes file, read anew, a bounded number at a time, whenever they are asked for."""

    path: Path
    bytes: int
    modified: int
    num_predictions: int

    @classmethod
    def of(cls, path: Path) -> "StoredRows":
        """The rows of a file as it is now."""
        about, now = open_table(path).metadata, path.stat()
        count = sum(_size_of(about.row_group(i)) for i in range(about.num_row_groups))
        return cls(path, now.st_size, now.st_mtime_ns, count)

    def check_unchanged(self) -> None:
        """Raise if the file is not the one that was checked."""
        now = self.path.stat() if self.path.is_file() else None
        if now is None or (now.st_size, now.st_mtime_ns) != (self.bytes, self.modified):
            raise _refusal(self.path, "has changed since it was checked; start again")

    def to_batches(self) -> Iterator[pa.RecordBatch]:
        """All rows: a row group at a time, or, where it is larger, a part of it."""
        self.check_unchanged()
        with named_damage(self.path):
            file = open_table(self.path)
            for number in range(file.num_row_groups):
                group = file.metadata.row_group(number)
                size = max(1, group.num_rows * HELD_PREDICTIONS // max(1, _size_of(group)))
                yield from file.iter_batches(min(size, ROW_GROUP_ROWS), row_groups=[number])
        self.check_unchanged()

    def in_memory(self) -> pa.Table:
        """All rows, as a table."""
        return pa.Table.from_batches(self.to_batches(), SCHEMA)


def _size_of(group: pq.RowGroupMetaData) -> int:
    """Predictions of a row group."""
    return int(group.column(group.num_columns - 1).num_values)


def read_header(values: object, path: Path) -> VotesHeader:
    """The header of a file; rejects missing fields, other types and invalid numbers."""
    try:
        header = VotesHeader.from_dict(values)
    except ValueError as error:
        raise _refusal(path, str(error)) from error
    if header.kind not in FAMILIES:
        raise _refusal(path, f"has unknown kind {header.kind!r}")
    family = family_of(header.kind)
    try:
        check_fields(header.settings, family.recorded_fields, prefix="settings.")
    except ValueError as error:
        raise _refusal(path, str(error)) from error
    image = header.image
    counts = [header.num_classes - 1, header.num_items, image.channels, image.height, image.width]
    if min(counts) < 1 or header.num_classes > 2**16 or not family.is_possible(header):
        raise _refusal(path, f"has impossible settings: {header.to_dict()}")
    try:
        family.check_evidence(header)
    except CasemateError as error:
        raise _refusal(path, f"has impossible settings: {error}") from error
    return header


class _RowChecker:
    """Raises unless every item occurs once and its streams are complete, without gap or overlap.

    Sees sorted rows, batch by batch. If items may stop early, the family checks their number of
    draws.
    """

    def __init__(self, header: VotesHeader, path: Path) -> None:
        self.header, self.path = header, path
        self.family, self.sizes = family_of(header.kind), stream_sizes(header)
        self.num_items, self.item_id = 0, ""
        self.identity: tuple[int, str] | None = None
        self.reached: dict[str, int] = {}

    def add(self, table: pa.Table) -> None:
        """Check further rows."""
        for row in rows_of(table):
            if row.item_id != self.item_id or not self.num_items:
                self._next_item(row)
            if problem := self._problem_of(row):
                where = f"item {row.item_id}, {row.stream} {row.start}..{row.stop}"
                raise _refusal(self.path, f"{problem} {where}")
            if self.identity != (row.label, row.image_sha256):
                raise _refusal(self.path, f"gives item {row.item_id} two labels or two images")
            self.reached[row.stream] = row.stop

    def _problem_of(self, row: VoteRow) -> str | None:
        """What is wrong with one block, if anything is: a text that its place completes."""
        reached, num_classes = self.reached.get(row.stream), self.header.num_classes
        if reached is None:
            return "has a stream that its kind does not have:"
        if row.start != reached:
            return f"has a {'overlap or duplicate' if row.start < reached else 'gap'} at"
        if row.stop <= row.start or len(row.predictions) != row.stop - row.start:
            return f"has {len(row.predictions)} predictions at"
        try:
            unknown = self.family.unknown_votes(row.predictions, self.header)
        except ValueError as error:
            return f"{error} at"
        known = row.predictions[~unknown]
        if int(known.max()) >= num_classes or not 0 <= row.label < num_classes:
            return f"has a class outside [0, {num_classes}) at"
        return None

    def finish(self) -> None:
        """Check that there are no more rows to come."""
        self._end_item()
        if self.num_items != self.header.num_items:
            found = f"holds {self.num_items} items, its header records {self.header.num_items}"
            raise _refusal(self.path, found)

    def _next_item(self, row: VoteRow) -> None:
        self._end_item()
        if row.item_id <= self.item_id:
            found = f"is not sorted, or has an empty item id, at item {row.item_id!r}"
            raise _refusal(self.path, found)
        self.num_items, self.item_id = self.num_items + 1, row.item_id
        self.identity, self.reached = (row.label, row.image_sha256), dict.fromkeys(self.sizes, 0)

    def _end_item(self) -> None:
        if not self.num_items or self.reached == self.sizes:
            return
        stopped = all(0 < self.reached[stream] <= size for stream, size in self.sizes.items())
        if not stopped or not self.family.may_stop(self.header):
            found = f"is incomplete for item {self.item_id}: {self.reached} of {self.sizes}"
            raise _refusal(self.path, found)


def _checked(tables: Iterable[pa.Table], header: VotesHeader, path: Path) -> Iterator[pa.Table]:
    """The same tables of sorted rows; raises unless they are whole."""
    checker = _RowChecker(header, path)
    for table in tables:
        checker.add(table)
        yield table
    checker.finish()


def _refusal(path: Path, remedy: str) -> CasemateError:
    return CasemateError("votes", path, remedy)


def _tables(parts: Iterable[pa.Table | VoteRow], path: Path) -> Iterator[pa.Table]:
    """Tables with the columns of SCHEMA; single rows are collected."""
    rows: list[VoteRow] = []
    size = 0
    for part in parts:
        if isinstance(part, pa.Table):
            yield _with_schema(part, path)
            continue
        rows.append(part)
        size += len(part.predictions)
        if size >= HELD_PREDICTIONS:
            yield _table_of(rows, path)
            rows, size = [], 0
    if rows:
        yield _table_of(rows, path)


def _with_schema(table: pa.Table, path: Path) -> pa.Table:
    """The columns of votes, of a table that may have others beside them."""
    if not table.schema.equals(SCHEMA, check_metadata=True):  # quick: there may be a million
        if missing := sorted(set(SCHEMA.names) - set(table.column_names)):
            raise _refusal(path, f"needs the column {missing[0]}")
        table = table.select(SCHEMA.names).replace_schema_metadata(None)
        if not table.schema.equals(SCHEMA):
            raise _refusal(path, f"needs other types of columns than {table.schema.types}")
    lists = table["predictions"].chunks
    if any(cells.null_count for cells in (*table.columns, *(chunk.values for chunk in lists))):
        raise _refusal(path, "has empty cells")
    return table


def _table_of(rows: Sequence[VoteRow], path: Path) -> pa.Table:
    """One chunk per column, sorted: what is in order need not be copied again."""
    rows = sorted(rows, key=lambda row: (row.item_id, row.stream, row.start))
    arrays = [np.asarray(row.predictions) for row in rows]
    for row, array in zip(rows, arrays, strict=True):
        if array.ndim != 1 or array.dtype != np.uint16:
            raise _refusal(path, f"needs (n,) uint16 predictions, item {row.item_id} differs")
    offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int32)
    *plain, nested = SCHEMA
    columns = [pa.array([getattr(row, f.name) for row in rows], f.type) for f in plain]
    lists = pa.ListArray.from_arrays(offsets, np.concatenate(arrays), type=nested.type)
    return pa.Table.from_arrays([*columns, lists], schema=SCHEMA)
