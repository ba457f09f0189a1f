"""Parts: what was stored comes back, or the object is refused by name; a listing finds it again."""

from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.core.errors import CasemateError
from pipelines.runtime.groups import END_BYTES, Group, pack
from pipelines.runtime.parts import REMEDY, PartStore
from pipelines.runtime.store import Store
from pipelines.runtime.store_errors import UnavailableError

TABLE = pa.table(
    {
        "item_id": ["a", "b", "c"],
        "predictions": pa.array([[1, 2, 3], None, []], pa.list_(pa.int16())),
        "image": pa.array([b"\x00\x01", None, b""], pa.binary()),
        "norm": pa.array([0.5, None, -0.0], pa.float64()),
        "broken": pa.array([True, False, None]),
    }
)
NAMES = [f"u{number:03d}" for number in range(20)]


def table_of(name):
    return pa.table({"unit": [name], "n": [len(name)]})


def opened(folder, run_id="run-1") -> PartStore:
    return PartStore.in_folder(folder / "parts", run_id=run_id)


def write(parts, names, tables=None, *, of=NAMES, briefs=None):
    """A lease of the plan `of`, as a worker writes it and the driver records it."""
    plan = parts.plan(of)
    tables = tables or [table_of(name) for name in names]
    key, size = plan.writer.write(names, plan.ordinals_of(names), tables, briefs)
    plan.add(key, size, names)
    return Path(parts.store.where(key))


@pytest.fixture
def parts(tmp_path) -> PartStore:
    return opened(tmp_path)


@pytest.mark.parametrize(
    "table",
    [
        TABLE,
        TABLE.slice(1, 1),
        TABLE.slice(0, 0),
        pa.concat_tables([TABLE, TABLE.slice(2)]),
        pa.table({"n": pa.array(np.arange(3), mask=np.array([False, True, False]))}),
        pa.table({"nested": pa.array([[[1], None], None, [], [[None, 4]]])}),
        pa.table({"k": pa.array(["x", "y", "x"]).dictionary_encode()}),
        TABLE.replace_schema_metadata({"a": "b"}),
    ],
    ids=["nulls", "slice", "empty", "chunks", "masked", "nested", "dictionary", "metadata"],
)
def test_a_part_comes_back_as_it_was(tmp_path, parts, table):
    assert not parts.has("u")
    write(parts, ["v"], [table.slice(0, 1)], of=[])
    write(parts, ["u001", "u002", "u003"], [table, TABLE, table])
    for loaded in (parts.load("u001"), opened(tmp_path).load("u003")):
        assert loaded.schema.equals(table.schema)
        assert loaded.to_pylist() == table.to_pylist()
        assert loaded.schema.metadata is None
    assert parts.load("u002").equals(TABLE)
    assert parts.load("v").to_pylist() == table.slice(0, 1).to_pylist()


rows = st.lists(
    st.fixed_dictionaries(
        {
            "text": st.none() | st.text(max_size=3),
            "votes": st.none() | st.lists(st.none() | st.integers(-9, 9), max_size=3),
            "flag": st.none() | st.booleans(),
            "real": st.none() | st.floats(allow_nan=False),
        }
    ),
    max_size=6,
)
SCHEMA = pa.schema(
    {"text": pa.string(), "votes": pa.list_(pa.int64()), "flag": pa.bool_(), "real": pa.float64()}
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(rows, st.booleans()), min_size=1, max_size=6))
def test_tables_of_a_group_do_not_flow_into_each_other(given_rows):
    """Also with two schemas in one lease."""
    tables = [
        pa.Table.from_pylist(own, SCHEMA).select(["real", "votes"] if few else SCHEMA.names)
        for own, few in given_rows
    ]
    names = [f"n{i}" for i in range(len(tables))]
    content = pack(names, tables, run_id="r", briefs=[[i] for i in range(len(tables))])
    group = Group(content)
    assert dict(group).keys() == set(names)
    for name, table in zip(names, tables, strict=True):
        assert repr(group.table(name).to_pylist()) == repr(table.to_pylist())
    assert group.end.briefs() == [[i] for i in range(len(tables))]
    assert pack(names, tables, run_id="r", briefs=[[i] for i in range(len(tables))]) == content


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_truncated_groups_are_refused_by_name(tmp_path, parts, share):
    path = write(parts, NAMES[:3])
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(CasemateError, match="is damaged") as caught:
        opened(tmp_path).plan(NAMES).parts.load("u001")
    assert str(path) in str(caught.value)
    assert REMEDY in str(caught.value)
    path.unlink()  # the remedy
    assert not opened(tmp_path).plan(NAMES).finished().any()


def test_no_flipped_byte_changes_a_value(tmp_path, parts):
    path = write(parts, NAMES[:2], [TABLE, TABLE])
    content = path.read_bytes()
    for position in range(0, len(content), 3):
        damaged = bytearray(content)
        damaged[position] ^= 0x11
        path.write_bytes(damaged)
        with pytest.raises(CasemateError, match="is damaged"):
            opened(tmp_path).load("u001")


def test_a_damaged_end_is_refused_where_only_ends_are_read(tmp_path, parts):
    path = write(parts, ["u000", "u002"], briefs=[1, 2])
    content = bytearray(path.read_bytes())
    content[-120] ^= 0x11
    path.write_bytes(content)
    with pytest.raises(CasemateError, match=f"{path.name} is damaged"):
        opened(tmp_path).plan(NAMES)


def test_groups_of_other_work_are_not_used(tmp_path, parts):
    path = write(parts, NAMES[:3])
    other = opened(tmp_path, run_id="run-2")
    assert not other.plan(NAMES).finished().any()  # another folder
    assert not parts.plan(NAMES[::-1]).finished().any()
    foreign = Path(other.store.where(other.plan(NAMES).writer.folder)) / path.name
    foreign.parent.mkdir()
    foreign.write_bytes(path.read_bytes())
    with pytest.raises(CasemateError, match=f"{path.name} belongs to other work"):
        opened(tmp_path, run_id="run-2").plan(NAMES).parts.load("u001")
    moved = path.with_name(path.name.replace("000000000-000000002", "000000001-000000003"))
    path.rename(moved)
    with pytest.raises(CasemateError, match=f"{moved.name} belongs to other work"):
        opened(tmp_path).plan(NAMES).parts.load("u001")
    (moved.parent / "notes.arrow").write_text("x")
    with pytest.raises(CasemateError, match=r"notes\.arrow is not a result"):
        opened(tmp_path).plan(NAMES)


def test_parts_of_an_earlier_version_are_computed_again(tmp_path):
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "u001.parquet").write_bytes(b"PAR1")
    assert not opened(tmp_path).plan(NAMES).finished().any()
    assert not opened(tmp_path).has("u001")


def test_a_second_start_reads_no_group_of_consecutive_units(tmp_path, parts):
    write(parts, NAMES[:8])
    write(parts, NAMES[8:15])
    with (
        mock.patch.object(Store, "get", side_effect=AssertionError("read")),
        mock.patch.object(Store, "get_range", side_effect=AssertionError("read")),
    ):
        plan = opened(tmp_path).plan(NAMES)
        assert plan.finished().tolist() == [True] * 15 + [False] * 5
        assert plan.has("u003")
        assert not plan.has("u017")


def test_ragged_groups_and_added_units_are_found_by_their_ends(tmp_path, parts):
    write(parts, ["u001", "u004"], briefs=["one", "four"])
    write(parts, ["extra-1", "extra-2"], briefs=[[1] * END_BYTES, list(range(60_000))])
    with mock.patch.object(Store, "get", side_effect=AssertionError("read")):
        plan = opened(tmp_path).plan(NAMES)
        assert plan.finished().nonzero()[0].tolist() == [1, 4]
        assert plan.has("extra-1")
        assert not plan.has("extra-3")
        assert dict(plan.briefs(len)) == {1: "one", 4: "four"}
        assert plan.brief("extra-2", len) == list(range(60_000))  # an end of two reads


def test_briefs_of_groups_without_them_are_made_from_the_tables(tmp_path, parts):
    write(parts, NAMES[:2])
    write(parts, ["extra"], of=[])
    plan = opened(tmp_path).plan(NAMES)
    count = lambda table: table["n"].to_pylist()  # noqa: E731
    assert dict(plan.briefs(count)) == {0: [4], 1: [4]}
    assert opened(tmp_path).plan([]).brief("extra", count) == [5]


def test_tables_come_in_the_asked_order(tmp_path, parts):
    for start in (0, 5, 10, 15):
        write(parts, NAMES[start : start + 5])
    asked = [*NAMES[::-3], *NAMES[1::4]]
    found = [table["unit"][0].as_py() for table in opened(tmp_path).tables(asked)]
    assert found == asked
    with pytest.raises(CasemateError, match="u99 has no stored result"):
        parts.load("u99")


def test_all_tables_has_each_unit_once(tmp_path, parts):
    write(parts, NAMES[:4])
    plan = parts.plan(NAMES)
    for names in (NAMES[2:6], ["u003", "extra"], ["extra", "further"]):  # of workers thought dead
        ordinals = plan.ordinals_of(names)
        plan.writer.write(names, ordinals, [table_of(name) for name in names], None)
    for store in (opened(tmp_path).plan(NAMES).parts, opened(tmp_path)):
        found = [(unit, table["unit"][0].as_py()) for unit, table in store.all_tables()]
        assert sorted(found) == [(name, name) for name in sorted([*NAMES[:6], "extra", "further"])]
    plan.writer.write(["u005"], [5], [table_of("another")], None)
    with pytest.raises(CasemateError, match=r"part: u005 has two different results, in .* and "):
        list(opened(tmp_path).plan(NAMES).parts.all_tables())


def test_a_result_is_kept_while_the_storage_does_not_answer(tmp_path, parts):
    calls, slept = [], []

    def put(store, key, content):
        calls.append(key)
        if len(calls) < 4:
            raise UnavailableError("s3://x", "is unavailable (503)")

    with (
        mock.patch.object(Store, "put_same", put),
        mock.patch("pipelines.runtime.parts.time.sleep", slept.append),
    ):
        write(parts, NAMES[:2])
    assert len(set(calls)) == 1
    assert slept == [1.0, 3.0, 10.0]


def test_a_bucket_keeps_results_like_a_folder(s3_root):
    def again():
        return PartStore(Store(s3_root), "recipe/step/unfinished/votes", run_id="run-1")

    parts = again()
    for names in (NAMES[:5], ["u006", "u009"], ["extra"]):
        plan = parts.plan(NAMES)
        tables = [table_of(name) for name in names]
        key, size = plan.writer.write(names, plan.ordinals_of(names), tables, names)
        plan.add(key, size, names)
    plan = again().plan(NAMES)
    assert plan.finished().nonzero()[0].tolist() == [0, 1, 2, 3, 4, 6, 9]
    assert plan.brief("extra", len) == "extra"
    assert dict(plan.briefs(len)) == {n: NAMES[n] for n in (0, 1, 2, 3, 4, 6, 9)}
    assert sorted(unit for unit, _ in plan.parts.all_tables()) == [
        "extra",
        *NAMES[:5],
        "u006",
        "u009",
    ]
    assert plan.parts.load("u009").equals(table_of("u009"))
    damaged = plan.parts.groups[0].key
    content = plan.parts.store.get(damaged)
    plan.parts.store.delete([damaged])
    plan.parts.store.put_new(damaged, content[:-1])
    with pytest.raises(CasemateError, match=f"part: {s3_root}/{damaged} is damaged"):
        again().plan(NAMES).parts.load("u001")
