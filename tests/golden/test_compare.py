"""The comparison of two runs sees what differs, and nothing where only times and versions do."""

import json
import shutil
import sqlite3

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.golden.compare import show
from tests.golden.contents import compare_storages
from tests.golden.layout import CERTIFICATES

STEP = "golden/certify.l2-0123456789ab"
MANIFEST = {"step": "certify.l2", "files": {}, "inputs": {}, "git_revision": "one"}


@pytest.fixture
def storages(tmp_path):
    """Two storages of one step each, equal but for times and versions."""
    for number, name in enumerate(("old", "new")):
        folder = tmp_path / name / STEP
        shutil.copytree(CERTIFICATES / "l2", folder)
        manifest = MANIFEST | {"git_revision": name, "software": {"torch": name}}
        (folder / "manifest.json").write_text(json.dumps(manifest))
        (folder / "history.json").write_text(json.dumps({"rows": [{"loss": 1, "seconds": number}]}))
        np.savez(folder / "examples.npz", images=np.arange(4.0))
        (folder / "train.csv").write_text(f"loss,seconds\n1,{number}\n")
        page = f'<p>Run {number:032x}</p><svg><path/></svg><td class="num">{number}</td>'
        (folder / "report.html").write_text(page)
        with sqlite3.connect(tmp_path / name / "mlflow.db") as database:
            database.execute("CREATE TABLE runs (run_uuid, name)")
            database.execute("CREATE TABLE metrics (run_uuid, key, step, value)")
            database.execute("CREATE TABLE params (run_uuid, key, value)")
            database.execute("CREATE TABLE tags (run_uuid, key, value)")
            database.execute("CREATE TABLE registered_model_aliases (name, alias, version)")
            database.execute("CREATE TABLE datasets (name, digest)")
            database.execute("INSERT INTO runs VALUES (?, 'certify.l2')", [name])
            database.execute("INSERT INTO metrics VALUES (?, 'certify/l2/accuracy', 0, 1)", [name])
            database.execute("INSERT INTO metrics VALUES (?, 'x/seconds', 0, ?)", [name, number])
    return tmp_path / "old", tmp_path / "new"


def differences(storages):
    return {row.what: row.how for row in compare_storages(*storages) if row.how}


def test_times_and_versions_do_not_count(storages):
    assert differences(storages) == {}
    compared = {row.what for row in compare_storages(*storages)}
    assert {"votes.parquet", "certificate.json", "examples.npz", "folder name"} <= compared


def test_a_changed_number_is_found(storages):
    path = storages[1] / STEP / "certificate.json"
    document = json.loads(path.read_text())
    document["summary"]["average_certified_radius"] *= 1 + 1e-15
    path.write_text(json.dumps(document))
    ((what, how),) = differences(storages).items()
    assert what == "certificate.json"
    assert how.startswith("other values: /summary/average_certified_radius was ")


def test_a_changed_key_is_found(storages):
    path = storages[1] / STEP / "history.json"
    path.write_text(json.dumps({"rows": [{"loss": 1, "duration": 0}]}))
    found = differences(storages)["history.json"]
    assert found == "other keys: ['rows / [] / duration', 'rows / [] / seconds']"


def test_changed_votes_and_arrays_are_found(storages):
    folder = storages[1] / STEP
    table = pq.read_table(folder / "votes.parquet")
    pq.write_table(table, folder / "votes.parquet", compression="none")
    pq.write_table(table.slice(1), folder / "certificates.parquet")
    np.savez(folder / "examples.npz", images=np.arange(4.0, dtype=np.float32))
    assert differences(storages) == {
        "votes.parquet": "other bytes, equal tables",
        "certificates.parquet": "other bytes",
        "examples.npz": "other values in images",
    }


def test_other_files_and_folders_are_found(storages):
    (storages[0] / STEP / "examples.npz").unlink()
    shutil.copytree(storages[1] / STEP, storages[1] / "golden" / "certify.l2-ba9876543210")
    assert differences(storages) == {
        "examples.npz": "is in NEW alone",
        "folder name": "is in NEW alone",
    }


def test_pages_and_tables_are_compared(storages):
    folder = storages[1] / STEP
    (folder / "train.csv").write_text("loss,seconds\n2,0\n")
    (folder / "report.html").write_text("<p>Flow</p><svg><circle/></svg>")
    assert differences(storages) == {
        "train.csv": "other rows",
        "figures of report.html": "1 of 1 figures differ",
        "words of report.html": "'<p>Run </p>' became '<p>Flow</p>'",
    }


def test_allowed_differences_are_shown_and_do_not_count(storages, capsys):
    (storages[1] / STEP / "report.html").write_text("<p>Flow</p><svg><path/></svg>")
    rows = compare_storages(*storages)
    assert show("files", rows, allowed=[]) == 1
    assert show("files", rows, allowed=["*/words of report.html"]) == 0
    assert "allowed    golden/certify.l2-0123456789ab" in capsys.readouterr().out


def test_what_mlflow_was_told_counts(storages):
    with sqlite3.connect(storages[1] / "mlflow.db") as database:
        database.execute("UPDATE metrics SET value = 0.5 WHERE key LIKE '%accuracy'")
    ((what, how),) = differences(storages).items()
    assert what == "1 metrics"
    assert how.startswith("2 rows, e.g. ")
