"""Rows of votes in canonical order, with bounded memory.

Tables arrive in any order and a row may arrive twice. What does not fit into memory is appended to
a file; once all item ids are known, its rows are distributed into files by ranges of ids, and each
range is sorted by itself. Row groups are cut by the sorted rows alone, so the bytes of a votes file
do not depend on how its rows arrived.
"""

import shutil
import tempfile
from bisect import bisect_right
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import reduce
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from components.certify.vote_rows import HELD_PREDICTIONS, SCHEMA
from components.core.errors import CasemateError
from components.core.tables import ROW_GROUP_ROWS
from components.core.types import IntArray

ORDER = ("item_id", "stream", "start")
HELD_BYTES = 2**23  # of rows in the order of arrival: twice HELD_PREDICTIONS
MOST_RANGES = 256  # files that are open at once


def sorted_rows(
    tables: Iterable[pa.Table], *, path: Path, scratch: Path
) -> Generator[pa.Table, None, None]:
    """All rows in canonical order, each once; files in the folder `scratch` if there are many.

    Two different rows of the same draws are an error that names the votes file `path`. Close it:
    that removes the files.
    """
    remove_scratch(path, scratch)
    arrived = _in_pieces(tables)
    if (first := next(arrived, None)) is None:
        return
    if (second := next(arrived, None)) is None:
        yield _sorted(first, path)
        return
    with _scratch_folder(path, scratch) as folder:
        ids = _spill(chain([first, second], arrived), folder / "arrived")
        del first, second
        for name in _distribute(folder / "arrived", ids):
            with pa.OSFile(str(name)) as file:
                rows = pa.ipc.open_stream(file).read_all()
            name.unlink()
            yield _sorted(rows.combine_chunks(), path)


def remove_scratch(path: Path, scratch: Path) -> None:
    """Remove the scratch files of killed writers of `path`."""
    for stale in scratch.glob("*.merge"):
        if stale.name.startswith(f".{path.name}."):
            shutil.rmtree(stale, ignore_errors=True)


@contextmanager
def _scratch_folder(path: Path, scratch: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".merge", dir=scratch))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _in_pieces(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The same rows in tables of one chunk and about HELD_BYTES."""
    held: list[pa.Table] = []
    size = 0
    for table in tables:
        held.append(table)
        size += table.nbytes
        if size >= HELD_BYTES:
            yield pa.concat_tables(held).combine_chunks()
            held, size = [], 0
    if held:
        yield pa.concat_tables(held).combine_chunks()


def _spill(pieces: Iterable[pa.Table], path: Path) -> list[str]:
    """Append all rows to a file; returns the item ids, sorted."""
    ids: set[str] = set()
    with _stream_writer(path) as writer:
        for piece in pieces:
            ids.update(pc.unique(piece["item_id"]).to_pylist())
            writer.write_table(piece)
    return sorted(ids)


def _distribute(arrived: Path, ids: Sequence[str]) -> list[Path]:
    """Move the rows into one file for each of at most MOST_RANGES ranges of ids, in their order."""
    cuts = ids[:: -(-len(ids) // MOST_RANGES)]
    names = [arrived.with_name(f"{number:03d}") for number in range(len(cuts))]
    with ExitStack() as stack:
        writers = [stack.enter_context(_stream_writer(name)) for name in names]
        file = stack.enter_context(pa.OSFile(str(arrived)))
        for batch in pa.ipc.open_stream(file):
            places = _places(batch, cuts)
            order = np.argsort(places, kind="stable")
            found, starts = np.unique(places[order], return_index=True)
            rows = batch if len(found) == 1 else batch.take(order)
            for place, low, high in zip(found, starts, [*starts[1:], len(order)], strict=True):
                writers[place].write_batch(rows.slice(low, high - low))
    arrived.unlink()
    return names


def _places(batch: pa.RecordBatch, cuts: Sequence[str]) -> IntArray:
    """(rows,) the range of each row."""
    coded = batch["item_id"].dictionary_encode()
    places = [bisect_right(cuts, item_id) - 1 for item_id in coded.dictionary.to_pylist()]
    found: IntArray = np.array(places, dtype=np.int64)[coded.indices.to_numpy()]
    return found


@contextmanager
def _stream_writer(path: Path) -> Iterator[pa.ipc.RecordBatchStreamWriter]:
    options = pa.ipc.IpcWriteOptions(compression="lz4")  # less than half of the bytes
    with (
        pa.OSFile(str(path), "wb") as file,
        pa.ipc.new_stream(file, SCHEMA, options=options) as writer,
    ):
        yield writer


def _sorted(table: pa.Table, path: Path) -> pa.Table:
    """The rows of a table of one chunk in canonical order, each once."""
    order = pc.sort_indices(table, [(name, "ascending") for name in ORDER]).to_numpy()
    if not np.array_equal(order, np.arange(len(order))):
        table = table.take(order).combine_chunks()
    return _without_twins(table, path)


def _without_twins(table: pa.Table, path: Path) -> pa.Table:
    """Sorted rows without those that were computed twice; both results must be equal."""
    last = max(0, len(table) - 1)
    same = [pc.equal(table[name][1:], table[name].slice(0, last)) for name in ORDER]
    twins = np.flatnonzero(reduce(pc.and_, same).to_numpy()) + 1
    if not len(twins):
        return table
    for place in twins.tolist():
        if not table.slice(place, 1).equals(table.slice(place - 1, 1)):
            item_id, stream, start = (table[name][place].as_py() for name in ORDER)
            remedy = f"has two different results for item {item_id}, {stream} from draw {start} on"
            raise CasemateError("votes", path, remedy)
    keep = np.ones(len(table), dtype=np.bool_)
    keep[twins] = False
    return table.filter(pa.array(keep)).combine_chunks()


def row_groups(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The same rows, cut where one more row would make more than a row group holds.

    A row group has at most ROW_GROUP_ROWS rows and, unless it is a single row, HELD_PREDICTIONS.
    """
    rest = SCHEMA.empty_table()
    for table in tables:
        *whole, rest = _cut(pa.concat_tables([rest, table]).combine_chunks())
        yield from whole
    if len(rest):
        yield rest


def _cut(table: pa.Table) -> Iterator[pa.Table]:
    """Row groups; further rows may belong to the last one."""
    ends = np.cumsum(pc.list_value_length(table["predictions"]).to_numpy(), dtype=np.int64)
    low = 0
    while low < len(table) or not low:
        before = ends[low - 1] if low else 0
        fitting = int(np.searchsorted(ends, before + HELD_PREDICTIONS, side="right"))
        high = min(max(low + 1, fitting), low + ROW_GROUP_ROWS)
        yield table.slice(low, high - low).combine_chunks()
        low = high
