"""Certificates derived from votes: values by hand, metrics, and bytes that repeat."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from components.certify.certificate import derive, write_certificate
from components.certify.l2.bounds import clopper_pearson_lower, radius_lower
from components.certify.votes import read_votes, write_votes
from components.core.digests import digest_file
from components.core.errors import CasemateError


def test_columns_by_hand(columns_folder):
    # 8 bands, i * 8 // 10 of them for the next class; band 1, stride 1: m = 1, 2 touch 1, 2 bands.
    table = pq.read_table(columns_folder / "certificates.parquet").to_pylist()
    assert [(r["top_votes"], r["runner_up_votes"]) for r in table] == [
        (8, 0),
        (8, 0),
        (7, 1),
        (6, 2),
        (5, 3),
        (4, 4),
    ]
    # item 5 ties 4:4 between classes 2 and 0; the lowest wins
    assert [r["prediction"] for r in table] == [0, 1, 2, 0, 1, 0]
    assert [r["margin"] for r in table] == [8, 7, 5, 4, 2, 0]
    assert [r["certified_patch_sizes"] for r in table] == [[1, 2]] * 4 + [[1], []]
    assert [r["correct"] for r in table] == [True, False, True, True, False, False]
    assert not any(r["abstain"] for r in table)


def test_columns_document(columns_folder):
    document = json.loads((columns_folder / "certificate.json").read_text())
    assert document["kind"] == "columns"
    assert document["sound"] is True
    assert document["threat"]["kind"] == "patch"
    assert "before normalisation" in document["threat"]["unit"]
    assert document["claim"] == {"patch_sizes": [1, 2], "rule": "count"}
    assert document["votes_sha256"] == digest_file(columns_folder / "votes.parquet")
    assert document["certificates_sha256"] == digest_file(columns_folder / "certificates.parquet")
    summary = document["summary"]
    assert summary["standard_accuracy"]["value"] == 3 / 6
    assert [(e["patch_size"], e["num_touched"]) for e in summary["certified"]] == [(1, 1), (2, 2)]
    assert [e["accuracy"]["value"] for e in summary["certified"]] == [3 / 6, 3 / 6]
    assert summary["certified"][0]["accuracy"]["num_items"] == 6


def test_gaussian_by_hand(gaussian_folder):
    table = pq.read_table(gaussian_folder / "certificates.parquet").to_pylist()
    bounds = [clopper_pearson_lower(k, 100, 0.001) for k in (100, 90, 80, 70, 60)]
    assert [r["p_lower"] for r in table][:5] == bounds
    assert [r["abstain"] for r in table] == [False] * 4 + [True] * 2
    assert [r["prediction"] for r in table] == [0, 1, 2, 0, -1, -1]
    assert [r["radius"] for r in table] == [radius_lower(p, 0.5) for p in bounds[:4]] + [0.0, 0.0]
    assert {(r["n0"], r["n"]) for r in table} == {(10, 100)}


def test_gaussian_metrics(gaussian_folder):
    document = json.loads((gaussian_folder / "certificate.json").read_text())
    table = pq.read_table(gaussian_folder / "certificates.parquet").to_pylist()
    summary = document["summary"]
    radii = [r["radius"] for r in table if r["correct"]]
    assert summary["standard_accuracy"]["value"] == 3 / 6  # item 1 is wrong with a radius
    assert summary["abstain_rate"]["value"] == 2 / 6
    assert summary["average_certified_radius"] == pytest.approx(sum(radii) / 6)
    for entry in summary["certified"]:
        assert entry["accuracy"]["value"] == sum(r >= entry["radius"] for r in radii) / 6
    assert document["threat"]["sigma"] == 0.5
    assert summary["max_radius"] == max(radii)  # item 0 is unanimous


def test_a_radius_counts_at_its_own_value_and_not_one_bit_above(gaussian_folder):
    votes = read_votes(gaussian_folder / "votes.parquet")
    table, _ = derive(votes, failure_prob=0.001, radii=[0.1])
    top = max(table.column("radius").to_pylist())
    _, summary = derive(votes, failure_prob=0.001, radii=[top, np.nextafter(top, 9).item()])
    assert [e["accuracy"]["value"] for e in summary["certified"]] == [1 / 6, 0.0]


def test_wrong_but_certified_items_do_not_count(columns_folder):
    rows = pq.read_table(columns_folder / "certificates.parquet").to_pylist()
    summary = json.loads((columns_folder / "certificate.json").read_text())["summary"]
    assert [r["certified_patch_sizes"] for r in rows if not r["correct"]] == [[1, 2], [1], []]
    assert summary["certified"][0]["accuracy"]["value"] == 3 / 6


@pytest.mark.parametrize("kind", ["columns", "gaussian"])
def test_bytes_repeat(kind, request, tmp_path):
    folder = request.getfixturevalue(f"{kind}_folder")
    header, rows = request.getfixturevalue(f"{kind}_evidence")
    claim = json.loads((folder / "certificate.json").read_text())["claim"]
    again = tmp_path / "again"
    again.mkdir()
    votes = write_votes(again / "votes.parquet", reversed(rows), header)
    write_certificate(again, votes, {name: claim[name] for name in reversed(claim)})
    names = ["certificate.json", "certificates.parquet", "votes.parquet"]
    assert sorted(p.name for p in again.iterdir()) == names
    for name in names:
        assert (again / name).read_bytes() == (folder / name).read_bytes()


def test_rules_nest(columns_folder):
    votes = read_votes(columns_folder / "votes.parquet")
    certified = {}
    for rule in ("strict", "count", "loc"):
        table, _ = derive(votes, patch_sizes=[1, 2, 3], rule=rule)
        lists = table.column("certified_patch_sizes").to_pylist()
        certified[rule] = {(i, m) for i, sizes in enumerate(lists) for m in sizes}
    assert certified["strict"] < certified["count"] <= certified["loc"]


@pytest.mark.parametrize(
    ("kind", "settings", "key"),
    [
        ("columns", {"patch_sizes": [1], "rule": "count", "radii": [1.0]}, "certify.radii"),
        ("columns", {"patch_sizes": [1]}, "certify.rule"),
        ("columns", {"patch_sizes": [], "rule": "count"}, "certify.patch_sizes"),
        ("columns", {"patch_sizes": [9], "rule": "count"}, "certify.patch_sizes"),
        ("columns", {"patch_sizes": 3, "rule": "count"}, "certify.patch_sizes"),
        ("columns", {"patch_sizes": [1], "rule": "paper"}, "certify.rule"),
        ("gaussian", {"failure_prob": 0.001, "radii": [0.0]}, "certify.radii"),
        ("gaussian", {"failure_prob": "often", "radii": [0.5]}, "certify.failure_prob"),
        ("gaussian", {"failure_prob": 1e-31, "radii": [0.5]}, "certify.num_estimate"),
        ("gaussian", {"failure_prob": 0.001, "radii": [0.5], "rule": "loc"}, "certify.rule"),
    ],
)
def test_settings_that_make_no_sense_are_named(kind, settings, key, request):
    votes = read_votes(request.getfixturevalue(f"{kind}_folder") / "votes.parquet")
    with pytest.raises(CasemateError) as caught:
        derive(votes, **settings)
    assert caught.value.key == key


def test_certificates_are_written_beside_their_own_votes_only(columns_folder, tmp_path):
    votes = read_votes(columns_folder / "votes.parquet")
    with pytest.raises(CasemateError, match=r"votes\.parquet is missing"):
        write_certificate(tmp_path, votes, {"patch_sizes": [1], "rule": "count"})
