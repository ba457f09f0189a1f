"""The votes file: all single predictions, from which certificates are derived.

One row is a block: predictions of the draws (or ablations, or pairs of masks) start, ..., stop - 1
of one item and stream. The header, stored in the Parquet schema, records which model voted on
which data under which settings. Incomplete files, or files that contradict their header, are
rejected on writing and on reading.
"""

import json
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path

import numpy as np
import pyarrow as pa

from components.certify.header import VotesHeader, check_fields
from components.certify.registry import FAMILIES, family_of
from components.certify.vote_rows import SCHEMA, VoteRow, Votes, rows_of
from components.core.digests import canonical_json, digest_file
from components.core.errors import CasemateError
from components.core.tables import read_table, write_table

HEADER_KEY = b"casemate"
MOST_PREDICTIONS = 2**31  # in one file: lists have 32-bit offsets


def stream_sizes(header: VotesHeader) -> dict[str, int]:
    """Predictions of every item per stream; an upper bound if items may stop early."""
    return family_of(header.kind).streams(header)


def check_can_store(header: VotesHeader) -> None:
    """Reject more predictions than one file holds, before any is computed."""
    count = header.num_items * sum(stream_sizes(header).values())
    if count >= MOST_PREDICTIONS and not family_of(header.kind).may_stop(header):
        remedy = f"would make {count:,} predictions; a file holds fewer than 2^31: certify fewer"
        raise CasemateError("certify.num_items", header.num_items, remedy)


def write_votes(path: Path, rows: Iterable[VoteRow], header: Mapping[str, object]) -> Votes:
    """Check, sort and store the votes of a whole run; equal votes and header give equal bytes."""
    ordered = sorted(rows, key=lambda row: (row.item_id, row.stream, row.start))
    plain_header = json.loads(canonical_json(header))  # tuples become lists, as after reading
    checked = read_header(plain_header, path)
    table = _table_of(ordered, path).replace_schema_metadata(
        {HEADER_KEY: canonical_json(checked.to_dict())}
    )
    _check_rows(ordered, checked, path)
    write_table(path, table)
    return Votes(checked, table, digest_file(path))


def read_votes(path: Path) -> Votes:
    """Read a votes file; an error names it unless it is complete and matches its header."""
    table = read_table(path)
    raw = (table.schema.metadata or {}).get(HEADER_KEY)
    if raw is None or not table.schema.equals(SCHEMA):
        raise CasemateError("votes", path, "is not a votes file: its header or columns are missing")
    try:
        stored = json.loads(raw)
    except ValueError as error:
        raise CasemateError("votes", path, f"has an unreadable header: {error}") from error
    header = read_header(stored, path)
    lists = table.column("predictions").chunks
    if any(cells.null_count for cells in (*table.columns, *(chunk.values for chunk in lists))):
        raise _refusal(path, "has empty cells")
    _check_rows(rows_of(table), header, path)
    return Votes(header, table, digest_file(path))


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


def _check_rows(rows: Iterable[VoteRow], header: VotesHeader, path: Path) -> None:
    """Raise unless every item occurs once and its streams are complete, without gap or overlap.

    If items may stop early, the family checks their number of draws.
    """
    sizes, num_items, last = stream_sizes(header), 0, ""
    may_stop = family_of(header.kind).may_stop(header)
    for item_id, item_rows in groupby(rows, key=lambda row: row.item_id):
        if item_id <= last:
            raise _refusal(path, f"is not sorted, or has an empty item id, at item {item_id!r}")
        num_items, last = num_items + 1, item_id
        reached = dict.fromkeys(sizes, 0)
        identity = None
        for row in item_rows:
            _check_block(row, reached, header, path)
            if identity not in (None, (row.label, row.image_sha256)):
                raise _refusal(path, f"gives item {item_id} two labels or two images")
            identity = (row.label, row.image_sha256)
            reached[row.stream] = row.stop
        stopped = may_stop and all(0 < reached[s] <= sizes[s] for s in sizes)
        if reached != sizes and not stopped:
            raise _refusal(path, f"is incomplete for item {item_id}: {reached} of {sizes}")
    if num_items != header.num_items:
        raise _refusal(path, f"holds {num_items} items, its header records {header.num_items}")


def _check_block(row: VoteRow, reached: Mapping[str, int], header: VotesHeader, path: Path) -> None:
    where = f"item {row.item_id}, {row.stream} {row.start}..{row.stop}"
    num_classes = header.num_classes
    if row.stream not in reached:
        raise _refusal(path, f"has a stream that its kind does not have: {where}")
    if row.start != reached[row.stream]:
        found = "overlap or duplicate" if row.start < reached[row.stream] else "gap"
        raise _refusal(path, f"has a {found} at {where}")
    if row.stop <= row.start or len(row.predictions) != row.stop - row.start:
        raise _refusal(path, f"has {len(row.predictions)} predictions at {where}")
    try:
        known = row.predictions[~family_of(header.kind).unknown_votes(row.predictions, header)]
    except ValueError as error:
        raise _refusal(path, f"{error} at {where}") from error
    if int(known.max()) >= num_classes or not 0 <= row.label < num_classes:
        raise _refusal(path, f"has a class outside [0, {num_classes}) at {where}")


def _refusal(path: Path, remedy: str) -> CasemateError:
    return CasemateError("votes", path, remedy)


def _table_of(rows: list[VoteRow], path: Path) -> pa.Table:
    """One chunk per column, so that the bytes do not depend on how the rows arrived."""
    arrays = [np.asarray(row.predictions) for row in rows]
    for row, array in zip(rows, arrays, strict=True):
        if array.ndim != 1 or array.dtype != np.uint16:
            raise _refusal(path, f"needs (n,) uint16 predictions, item {row.item_id} differs")
    offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
    if offsets[-1] >= MOST_PREDICTIONS:
        raise _refusal(path, "would hold 2^31 predictions or more; certify fewer items per file")
    values = np.concatenate([*arrays, np.empty(0, np.uint16)])
    *plain, nested = SCHEMA
    columns = [pa.array([getattr(row, f.name) for row in rows], f.type) for f in plain]
    lists = pa.ListArray.from_arrays(offsets.astype(np.int32), values, type=nested.type)
    return pa.Table.from_arrays([*columns, lists], schema=SCHEMA)
