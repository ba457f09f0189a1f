"""The long table: its columns, equal bytes, and numbers that must explain themselves."""

import random
from dataclasses import fields, replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.core.errors import CasemateError
from components.core.statistics import wilson_interval
from components.evaluate.metrics import (
    SCHEMA,
    Measurement,
    MetricRow,
    Subject,
    mlflow_name,
    null,
    read_metrics,
    rows_of,
    share,
    write_metrics,
)

COLUMNS = (
    "model, model_digest, family, arch, params_m, gmacs, pretrain, recipe, dataset, dataset_digest,"
    " suite, item, level, metric, value, n, lo95, hi95, seed, resize, fidelity, flags"
)
SUBJECT = Subject(
    model="vit",
    model_digest="abc",
    family="vit",
    arch="vit_base_patch16_224",
    params_m=86.6,
    dataset="imagenet",
    dataset_digest="def",
    seed=7,
    resize="squash",
)


def some_rows():
    verdicts = np.array([True, False, True, True])
    return [
        *rows_of(
            SUBJECT,
            "corruptions",
            [share(verdicts, item="snow", level=level) for level in (1, 2, 3, 4, 5)],
        ),
        *rows_of(
            replace(SUBJECT, model="resnet", params_m=None, fidelity="raw"),
            "corruptions",
            [
                null(item="all", metric="mce", why="frost is missing", flags=["procedural_frost"]),
                Measurement(item="all", metric="mean75", value=0.25, n=4, flags=("b", "a", "b")),
            ],
        ),
    ]


def test_columns_are_the_published_ones():
    assert ", ".join(SCHEMA.names) == COLUMNS
    assert {field.name for field in fields(MetricRow)} == set(SCHEMA.names)


def test_rows_survive_the_file(tmp_path):
    path = tmp_path / "metrics.parquet"
    write_metrics(path, some_rows())
    table = pq.read_table(path)
    assert table.schema == SCHEMA
    found = read_metrics(path)
    assert len(found) == len(some_rows())
    assert all(row in found for row in some_rows())
    missing = next(row for row in found if row.metric == "mce")
    assert missing.value is None
    assert missing.flags == ("null: frost is missing", "procedural_frost")
    assert next(row for row in found if row.metric == "mean75").flags == ("a", "b")


def test_equal_rows_in_any_order_give_equal_bytes(tmp_path):
    files = []
    for seed in range(3):
        rows = some_rows()
        random.Random(seed).shuffle(rows)
        files.append(tmp_path / f"{seed}.parquet")
        write_metrics(files[-1], iter(rows))
    assert len({file.read_bytes() for file in files}) == 1
    write_metrics(files[0], read_metrics(files[1]))
    assert files[0].read_bytes() == files[1].read_bytes()


def test_no_rows_are_a_table_too(tmp_path):
    write_metrics(tmp_path / "metrics.parquet", [])
    assert read_metrics(tmp_path / "metrics.parquet") == []


def test_two_numbers_at_one_place_are_refused(tmp_path):
    row = some_rows()[0]
    with pytest.raises(ValueError, match="two rows for vit corruptions snow 1 accuracy"):
        write_metrics(tmp_path / "metrics.parquet", [row, replace(row, value=0.1)])
    assert not (tmp_path / "metrics.parquet").exists()


def test_other_files_are_named(tmp_path):
    path = tmp_path / "metrics.parquet"
    with pytest.raises(CasemateError, match="does not exist"):
        read_metrics(path)
    pq.write_table(pa.table({"model": ["vit"]}), path)
    with pytest.raises(CasemateError, match="its columns differ"):
        read_metrics(path)
    path.write_bytes(b"PAR1")
    with pytest.raises(CasemateError, match="truncated or damaged"):
        read_metrics(path)


def test_null_needs_a_reason_and_numbers_are_finite():
    with pytest.raises(ValueError, match="a null value needs a reason"):
        Measurement(item="snow", metric="accuracy", value=None)
    for number in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="must be finite"):
            Measurement(item="snow", metric="accuracy", value=number)
    assert Measurement(item="a", metric="b", value=0.0, level=-0.0).level == 0
    with pytest.raises(ValueError, match="expected"):
        share(np.array([1, 2, 3]), item="snow")  # a running total


def test_shares_carry_their_interval():
    found = share(np.array([True] * 9 + [False]), item="x", metric="m", level=2, flags=["f"])
    assert (found.value, found.n, found.level, found.flags) == (0.9, 10, 2.0, ("f",))
    assert (found.lo95, found.hi95) == wilson_interval(9, 10)
    empty = share(np.zeros(0, bool), item="x")
    assert (empty.value, empty.flags) == (None, ("null: no items",))


def test_names_in_mlflow():
    first, *_, last = some_rows()
    assert mlflow_name(first) == "evaluate/corruptions/snow/s1/accuracy"
    assert mlflow_name(last) == "evaluate/corruptions/mean75"
