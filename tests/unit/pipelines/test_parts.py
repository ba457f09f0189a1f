"""Parts: what was saved comes back, or the file is refused by name."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.core.errors import CasemateError
from pipelines.runtime.parts import KEY, PartStore, content_digest

TABLE = pa.table(
    {
        "item_id": ["a", "b", "c"],
        "predictions": pa.array([[1, 2, 3], None, []], pa.list_(pa.int16())),
        "image": pa.array([b"\x00\x01", None, b""], pa.binary()),
        "norm": pa.array([0.5, None, -0.0], pa.float64()),
        "broken": pa.array([True, False, None]),
    }
)


@pytest.fixture
def store(tmp_path) -> PartStore:
    return PartStore(tmp_path / "parts", run_id="run-1")


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
    ],
    ids=["nulls", "slice", "empty", "chunks", "masked", "nested", "dictionary"],
)
def test_a_part_comes_back_as_it_was(store, table):
    assert not store.has("u")
    store.save("u", table)
    assert store.has("u")
    loaded = store.load("u")
    assert loaded.schema.equals(table.schema)
    assert loaded.to_pylist() == table.to_pylist()
    assert loaded.schema.metadata is None


rows = st.lists(
    st.fixed_dictionaries(
        {
            "text": st.none() | st.text(max_size=3),
            "votes": st.none() | st.lists(st.none() | st.integers(-9, 9), max_size=3),
            "flag": st.none() | st.booleans(),
            "real": st.none() | st.floats(allow_nan=False),
        }
    ),
    max_size=12,
)
SCHEMA = pa.schema(
    {"text": pa.string(), "votes": pa.list_(pa.int64()), "flag": pa.bool_(), "real": pa.float64()}
)


@settings(max_examples=60, deadline=None)
@given(rows, rows, st.integers(0, 12))
def test_the_digest_sees_values_and_not_memory(first, second, start):
    table = pa.Table.from_pylist(first, SCHEMA)
    rebuilt = pa.Table.from_pylist(first[start:], SCHEMA)
    assert content_digest(table.slice(start)) == content_digest(rebuilt)
    one, two = ([sorted(row.items()) for row in given] for given in (first, second))
    same = repr(one) == repr(two)  # repr: 0.0 and -0.0 are different bytes
    other = pa.Table.from_pylist(second, SCHEMA)
    assert (content_digest(table) == content_digest(other)) == same


def test_the_digest_sees_names_and_types():
    tables = [
        pa.table({"a": pa.array([1], pa.int64())}),
        pa.table({"b": pa.array([1], pa.int64())}),
        pa.table({"a": pa.array([1], pa.int32())}),
        pa.table({"a": pa.array([[1]], pa.list_(pa.int64()))}),
        pa.table({"a": pa.array([1], pa.int64()), "b": pa.array([1], pa.int64())}),
    ]
    assert len({content_digest(table) for table in tables}) == len(tables)


def test_lists_do_not_flow_into_each_other():
    tables = [pa.table({"a": rows}) for rows in ([[1, 2], [3]], [[1], [2, 3]], [[1, 2, 3], []])]
    assert len({content_digest(table) for table in tables}) == 3


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_truncated_parts_are_refused_by_name(store, share):
    store.save("unit-7", TABLE)
    content = store.path("unit-7").read_bytes()
    store.path("unit-7").write_bytes(content[: int(share * len(content))])
    with pytest.raises(CasemateError, match=r"unit-7\.parquet is damaged .*--force"):
        store.has("unit-7")


def test_no_flipped_byte_changes_a_value(store):
    """Some bytes carry no value (statistics, paddings): a flip is refused or changes nothing."""
    store.save("u", TABLE)
    content = store.path("u").read_bytes()
    refusals = []
    for position in range(0, len(content), 3):
        damaged = bytearray(content)
        damaged[position] ^= 0x11
        store.path("u").write_bytes(damaged)
        try:
            assert store.load("u").to_pylist() == TABLE.to_pylist()
        except CasemateError as error:
            refusals.append(error)
    assert {error.value for error in refusals} == {store.path("u")}
    assert len(refusals) > len(content) / 3 / 4


def test_changed_values_are_refused(store):
    store.save("u", TABLE)
    header = pq.read_schema(store.path("u")).metadata[KEY]
    changed = TABLE.set_column(0, "item_id", pa.array(["a", "b", "d"]))
    pq.write_table(changed.replace_schema_metadata({KEY: header}), store.path("u"))
    with pytest.raises(CasemateError, match=r"u\.parquet does not match its own digest"):
        store.load("u")


def test_parts_of_other_work_are_refused(store):
    store.save("u", TABLE)
    with pytest.raises(CasemateError, match=r"u\.parquet belongs to other work"):
        PartStore(store.folder, run_id="run-2").has("u")
    store.path("u").rename(store.path("v"))
    with pytest.raises(CasemateError, match=r"v\.parquet belongs to other work"):
        store.has("v")


@pytest.mark.parametrize(
    "metadata", [None, {KEY: b"{"}, {KEY: json.dumps({"run_id": "run-1", "unit": "u"}).encode()}]
)
def test_foreign_parquet_is_refused(store, metadata):
    pq.write_table(TABLE.replace_schema_metadata(metadata), store.path("u"))
    with pytest.raises(CasemateError, match=r"u\.parquet is damaged"):
        store.has("u")


def test_leftovers_of_a_killed_write_are_ignored(store):
    leftover = store.folder / ".u.parquet.0a1b.tmp"
    leftover.write_bytes(b"half of a part")
    assert not store.has("u")
    store.save("u", TABLE)
    assert store.has("u")


def test_a_failing_write_leaves_no_part(store, monkeypatch):
    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full_disk)
    with pytest.raises(OSError, match="No space left"):
        store.save("u", TABLE)
    assert not store.has("u")


def test_tables_come_in_the_asked_order(store):
    for name in ("a", "b", "c"):
        store.save(name, pa.table({"unit": [name]}))
    found = [table["unit"][0].as_py() for table in store.tables(["c", "a", "b"])]
    assert found == ["c", "a", "b"]
