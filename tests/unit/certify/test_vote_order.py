"""Large votes files: bytes do not depend on how rows arrive, memory not on their number."""

import signal
import subprocess
import sys
import tempfile
import tracemalloc
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.certify.certificate import write_certificate
from components.certify.header import VotesHeader
from components.certify.l2.draws import DrawLedger
from components.certify.l2.evidence import declare
from components.certify.l2.settings import GaussianSettings
from components.certify.l2.voters import Block, block_stop
from components.certify.verify import recertify, verify
from components.certify.vote_rows import SCHEMA, VoteRow
from components.certify.votes import read_votes, write_votes
from components.core.errors import CasemateError
from components.core.noise_streams import NOISE_IMPL, noise_impl
from tests.unit.certify.files import table_of, write_unchecked

SIZES = {"estimate": 60, "select": 10}
CLAIM = {"failure_prob": 0.001, "radii": [0.25]}


def header_of(num_items, sizes=SIZES):
    drawn = {"num_select": sizes["select"], "num_estimate": sizes["estimate"]}
    return {
        "kind": "gaussian", "run_id": "r", "model_digest": "a", "dataset_digest": "d",
        "num_classes": 3, "image": {"channels": 1, "height": 8, "width": 8},
        "settings": {"sigma": 0.5, "run_seed": 0, "method": "fixed", **drawn},
        "noise_impl": NOISE_IMPL, "num_items": num_items, "software": {},
    }  # fmt: skip


def rows_of_items(num_items, block, sizes=SIZES):
    """Votes of items whose ids are not in the order of their numbers."""
    rng = np.random.default_rng(num_items)
    for i in range(num_items):
        item_id = f"item-{(7919 * i) % 10_007}-\u00e9"
        for stream, size in sizes.items():
            votes = rng.integers(0, 3, size, np.uint16)
            for low in range(0, size, block):
                part = votes[low : low + block]
                yield VoteRow(item_id, i % 3, f"{i:064x}", stream, low, low + len(part), part)


def bytes_of(path, parts, header, **options):
    write_votes(path, parts, header, **options)
    return path.read_bytes()


@pytest.mark.parametrize("held", [50, 1000])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_bytes_do_not_depend_on_how_rows_arrive(held, data):
    rows = list(rows_of_items(data.draw(st.integers(1, 5)), data.draw(st.sampled_from([7, 60]))))
    twice = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=6))
    order = data.draw(st.permutations([*range(len(rows)), *twice]))
    cuts = data.draw(st.lists(st.integers(0, len(order)), max_size=8))
    edges = [0, *sorted(cuts), len(order)]
    tables = [table_of([rows[i] for i in order[a:b]]) for a, b in pairwise(edges)]
    header = header_of(len({row.item_id for row in rows}))
    with pytest.MonkeyPatch.context() as patched, tempfile.TemporaryDirectory() as name:
        for module in ("votes", "vote_order", "vote_rows"):
            patched.setattr(f"components.certify.{module}.HELD_PREDICTIONS", held)
        patched.setattr("components.certify.vote_order.HELD_BYTES", 3 * held)
        patched.setattr("components.certify.vote_order.MOST_RANGES", 3)
        path = Path(name) / "votes.parquet"
        found = bytes_of(path, iter(tables), header)
        assert [p.name for p in path.parent.iterdir()] == ["votes.parquet"]
        votes = read_votes(path)
        groups = pq.ParquetFile(path).metadata
        assert found == bytes_of(Path(name) / "b.parquet", rows, header)
        expected = {(r.item_id, r.stream, r.start): r for r in rows}
        stored = {(r.item_id, r.stream, r.start): r for r in votes.rows()}
        assert [*stored] == sorted(expected)
        assert all(
            np.array_equal(stored[k].predictions, r.predictions) for k, r in expected.items()
        )
        size = sum(len(row.predictions) for row in rows)
        if size <= held:
            write_unchecked(Path(name) / "c.parquet", rows, header)
            assert found == (Path(name) / "c.parquet").read_bytes()
        else:
            sizes = [groups.row_group(i).column(6).num_values for i in range(groups.num_row_groups)]
            assert sum(sizes) == size
            assert all(a <= held or groups.row_group(i).num_rows == 1 for i, a in enumerate(sizes))
            assert all(a + b > held for a, b in pairwise(sizes))  # none could be larger


@pytest.mark.parametrize("block", [1, 100])
def test_small_files_keep_the_bytes_of_the_first_version(tmp_path, block):
    """Also those of several row groups: 72,000 rows of one prediction."""
    sizes = {"estimate": 11_000, "select": 1_000}
    rows, header = list(rows_of_items(6, block, sizes)), header_of(6, sizes)
    write_unchecked(tmp_path / "old.parquet", rows, header)
    found = bytes_of(tmp_path / "new.parquet", [table_of(rows[::-1])], header)
    assert found == (tmp_path / "old.parquet").read_bytes()
    assert pq.ParquetFile(tmp_path / "new.parquet").num_row_groups == (2 if block == 1 else 1)


def test_large_files_of_both_formats_give_the_same_certificate(tmp_path):
    """2.2 million predictions: one row group before, now two, with the format in the file."""
    sizes = {"estimate": 110_000, "select": 10}
    rows, header = list(rows_of_items(20, 10_000, sizes)), header_of(20, sizes)
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
    write_unchecked(old / "votes.parquet", rows, header)
    votes = write_votes(new / "votes.parquet", (table_of([row]) for row in rows), header)
    again = read_votes(old / "votes.parquet")
    assert not isinstance(again.source, pa.Table)  # streamed
    for stored, expected in zip(again.items(), votes.items(), strict=True):
        assert stored.item_id == expected.item_id
        assert all(np.array_equal(stored.streams[s], expected.streams[s]) for s in sizes)
    write_certificate(old, again, CLAIM)
    write_certificate(new, votes, CLAIM)
    tables = [(f / "certificates.parquet").read_bytes() for f in (old, new)]
    assert tables[0] == tables[1]
    assert verify(old).ok
    assert verify(new).ok
    recertify(old, tmp_path / "stricter", failure_prob=0.0001)
    assert verify(tmp_path / "stricter").ok
    metadata = [pq.ParquetFile(f / "votes.parquet").metadata for f in (old, new)]
    assert [m.num_row_groups for m in metadata] == [1, 2]
    assert [m.metadata.get(b"casemate.votes_format") for m in metadata] == [None, b"2"]
    assert again.header == votes.header


def test_two_different_results_of_the_same_draws_are_refused(tmp_path, hold):
    rows, header = list(rows_of_items(4, 7)), header_of(4)
    other = replace(rows[3], predictions=(rows[3].predictions + 1) % np.uint16(3))
    where = f"two different results for item {other.item_id}, estimate from draw {other.start} on"
    for held in (2**21, 30):
        hold(held)
        with pytest.raises(CasemateError, match=where):
            write_votes(tmp_path / "votes.parquet", [table_of([*rows, other])], header)
        assert not list(tmp_path.iterdir())


def test_other_columns_are_ignored_and_other_types_refused(tmp_path):
    rows, header = list(rows_of_items(2, 60)), header_of(2)
    table = table_of(rows)
    units = table.append_column("unit", pa.array(range(len(rows))))
    expected = bytes_of(tmp_path / "a.parquet", rows, header)
    assert bytes_of(tmp_path / "b.parquet", [units], header) == expected
    wide = table.set_column(6, "predictions", table["predictions"].cast(pa.list_(pa.int64())))
    holed = table.set_column(1, SCHEMA.field(1), pa.array([None] * len(rows), pa.int32()))
    for wrong, text in ((wide, "types"), (holed, "empty"), (table.drop_columns("stop"), "stop")):
        with pytest.raises(CasemateError, match=text):
            write_votes(tmp_path / "c.parquet", [wrong], header)


def test_memory_does_not_grow_with_the_votes(tmp_path, hold):
    """20 MB of votes, shuffled: below 3 MB of Arrow's and Python's memory each."""
    hold(2**16)
    sizes = {"estimate": 100_000, "select": 100}
    header, order = header_of(100, sizes), np.random.default_rng(0).permutation(1_000)

    def tables():
        rng = np.random.default_rng(1)
        votes = rng.integers(0, 3, 10_000, np.uint16)
        for unit in order.tolist():
            item, block = divmod(unit, 10)
            name = (f"item-{item:03d}", 1, "0" * 64)
            rows = [VoteRow(*name, "estimate", 10_000 * block, 10_000 * (block + 1), votes)]
            yield table_of(
                [*rows, VoteRow(*name, "select", 0, 100, votes[:100])][: 1 + (not block)]
            )

    before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        votes = write_votes(tmp_path / "votes.parquet", tables(), header)
        write_certificate(tmp_path, votes, CLAIM)
        assert verify(tmp_path).ok
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(before)
    assert (tmp_path / "votes.parquet").stat().st_size > 0
    assert votes.source.num_predictions == 100 * 100_100
    assert pool.max_memory() < 3e6
    assert peak < 3e6


KILLED = """
import os, signal, sys
from pathlib import Path
from components.certify import vote_order
from components.certify.votes import write_votes
from tests.unit.certify.test_vote_order import header_of, rows_of_items, table_of

vote_order.HELD_BYTES = 400
def tables():
    yield from (table_of([row]) for row in rows_of_items(5, 7))
    os.kill(os.getpid(), signal.SIGKILL)

write_votes(Path(sys.argv[1]), tables(), header_of(5))
"""


def test_scratch_files_are_removed_also_those_of_a_killed_writer(tmp_path, hold):
    target, scratch = tmp_path / "votes.parquet", tmp_path / "scratch"
    done = subprocess.run([sys.executable, "-c", KILLED, target], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [p.suffix for p in tmp_path.iterdir() if p.is_dir()] == [".merge"]
    hold(30)
    write_votes(target, rows_of_items(5, 7), header_of(5))
    assert not [p for p in tmp_path.iterdir() if p.is_dir()]
    expected = target.read_bytes()
    target.unlink()
    seen = []

    def watched():
        for row in rows_of_items(5, 7):
            seen.extend(scratch.iterdir())
            yield table_of([row])

    scratch.mkdir()
    assert bytes_of(target, watched(), header_of(5), scratch=scratch) == expected
    assert seen
    assert not list(scratch.iterdir())


def test_files_of_unknown_formats_and_changed_ones_are_refused(tmp_path, hold):
    hold(30)
    path = tmp_path / "votes.parquet"
    votes = write_votes(path, rows_of_items(3, 7), header_of(3))
    assert len(list(votes.items())) == 3
    stored = pq.read_table(path)
    with pq.ParquetWriter(path, stored.schema) as writer:
        writer.write_table(stored)
        writer.add_key_value_metadata({"casemate.votes_format": "3"})
    with pytest.raises(CasemateError, match="has changed since it was checked"):
        list(votes.items())
    with pytest.raises(CasemateError, match="has votes format 3"):
        read_votes(path)


def test_damage_in_a_large_file_is_found_and_named(tmp_path, hold):
    hold(200)
    path = tmp_path / "votes.parquet"
    write_votes(path, rows_of_items(20, 60), header_of(20))
    group = pq.ParquetFile(path).metadata.row_group(3).column(6)
    content = bytearray(path.read_bytes())
    content[group.data_page_offset + group.total_compressed_size // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CasemateError, match=r"votes\.parquet is truncated or damaged"):
        read_votes(path)


@pytest.mark.parametrize("name", ["both", "early-blocks", "columns-b2-s1", "masks"])
def test_patch_certificates_of_many_items_are_derived_in_pieces(name, hold):
    """Kept votes of 24 items: the same rows and summary from a few items at a time."""
    kept = Path(__file__).parents[2] / "golden" / "record" / "certificates" / name
    whole = verify(kept)
    hold(20)
    votes = read_votes(kept / "votes.parquet")
    assert not isinstance(votes.source, pa.Table)
    assert len(list(votes.some_items())) > 3
    again = verify(kept)
    assert whole.ok
    assert again.ok
    assert again.num_items == 24


TRUTH = (0.99, 0.9, 0.82, 0.5)
SEQUENTIAL = GaussianSettings(
    kind="gaussian", sigma=0.3, method="sequential", radii=[0.25], num_estimate=2000,
    num_select=16, block_size=400, micro_batch=50,
)  # fmt: skip


def sequential_header():
    declared = declare(radii=[0.25], failure_prob=0.001, look_every=64, futility_prob=0.01)
    drawn = {"num_select": 16, "num_estimate": 2000, "method": "sequential", "declared": declared}
    return header_of(len(TRUTH)) | {
        "settings": {"sigma": 0.3, "run_seed": 0, **drawn},
        "noise_impl": noise_impl("sequential"),
    }


def toss(blocks):
    rows = []
    for b in blocks:
        rng = np.random.default_rng([b.item, b.stream == "select"])
        votes = (rng.random(b.stop) < TRUTH[b.item]).astype(np.uint16)[b.start :]
        rows.append(VoteRow(f"item-{b.item}", 1, "0" * 64, b.stream, b.start, b.stop, votes))
    return table_of(rows)


@pytest.fixture
def drawn():
    """A ledger whose items are decided, and the tables of all units that it requested."""
    ledger, tables = DrawLedger(SEQUENTIAL, VotesHeader.from_dict(sequential_header())), {}
    while units := ledger.next(6, ahead=6):  # more than items: some blocks are drawn ahead
        for unit in units:
            tables[unit.name] = toss(unit.payload)
            ledger.keep(unit, ledger.brief(tables[unit.name]))
    return ledger, tables


def test_draws_beyond_the_deciding_look_are_left_out(drawn, tmp_path):
    ledger, tables = drawn
    header = sequential_header()
    expected = bytes_of(tmp_path / "a.parquet", ledger.votes(tables.values()), header)
    votes = read_votes(tmp_path / "a.parquet")
    used = {item.item_id: item.used for item in ledger.items}
    assert {i.item_id: len(i.streams["estimate"]) for i in votes.items()} == used
    asked = sum(item.requested for item in ledger.items)
    assert asked > sum(used.values())  # more was drawn than is stored
    shuffled = [*reversed(tables.values()), *list(tables.values())[:3]]
    assert bytes_of(tmp_path / "b.parquet", ledger.votes(shuffled), header) == expected
    far = block_stop(SEQUENTIAL, ledger.items[0].requested)
    ahead = toss([Block(0, "estimate", far, block_stop(SEQUENTIAL, far))])
    assert bytes_of(tmp_path / "c.parquet", ledger.votes([ahead, *shuffled]), header) == expected


def test_a_lost_block_of_draws_is_named(drawn, tmp_path):
    ledger, tables = drawn
    needed = [n for n in tables if int(n.split("-draw-")[1]) < ledger.items[int(n[5:13])].used]
    for name in needed:
        kept = [table for other, table in tables.items() if other != name]
        item, start = int(name[5:13]), int(name.split("-draw-")[1])
        with pytest.raises(
            CasemateError, match=f"item item-{item} lacks its draws from {start} on"
        ):
            write_votes(tmp_path / "votes.parquet", ledger.votes(kept), sequential_header())
        assert not list(tmp_path.iterdir())
