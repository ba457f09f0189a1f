"""Patch certificates of every kind on the page: tables, sweeps, and what is not sound."""

import numpy as np
import pytest

from components.certify.certificate import write_certificate
from components.certify.votes import VoteRow, write_votes
from components.report import certified
from components.report.results import read_certify

SIDE, NUM_ITEMS = 8, 6


def made(folder, *, kind="rows", band=3, stride=1, settings=None, claim=None):
    """Votes of item i: class 1 wins all but i of them."""
    folder.mkdir()
    stream = "pairs" if kind == "double_masking" else kind
    settings = settings or {"band": band, "stride": stride}
    num_votes = 10 if kind == "double_masking" else -(-SIDE // stride)
    rows = []
    for i in range(NUM_ITEMS):
        votes = np.ones(num_votes, dtype=np.uint16)
        votes[: min(i, num_votes - 1)] = 0
        rows.append(VoteRow(f"item-{i}", 1, "0" * 64, stream, 0, num_votes, votes))
    header = {
        "kind": kind, "run_id": "made", "model_digest": "a", "dataset_digest": "d",
        "num_classes": 3, "image": {"channels": 1, "height": SIDE, "width": SIDE},
        "settings": settings, "noise_impl": None, "num_items": NUM_ITEMS, "software": {},
    }  # fmt: skip
    votes_file = write_votes(folder / "votes.parquet", rows, header)
    write_certificate(folder, votes_file, claim or {"patch_sizes": [1], "rule": "count"})
    return read_certify(f"certify.{folder.name}", folder)


def test_a_sweep_is_one_table_of_models_and_strides_by_size(tmp_path):
    results = [
        made(tmp_path / f"b{band}s{stride}", band=band, stride=stride)
        for band, stride in ((2, 1), (2, 2), (3, 1))
    ]
    (table,) = certified.sweep_tables(results, lambda _: "main")
    assert [row[:2] for row in table.rows] == [("main", 1), ("main", 2)]
    assert len(table.columns) == 2 + 2 * 2
    assert table.rows[1][4:] == (None, None)  # size 3 was not voted on at stride 2
    assert table.rows[0][3] == certified.share(results[0].certified_at_size(1))
    assert certified.sweep_tables(results[:1], lambda _: "main") == ()


def test_what_is_not_sound_is_never_set_as_proven(tmp_path):
    claim = {"patch_sizes": [1], "rule": "count", "delta_rule": "paper_reference",
             "second_rule": "loc"}  # fmt: skip
    result = made(tmp_path / "paper", stride=3, claim=claim)
    chart = certified.patch_chart(result, model="main", image_area=64)
    kinds = {(c.title, c.detail): c.kind for c in chart.table.columns}
    assert kinds["certified (not sound)", ""] == "measured"
    assert kinds["certified", "rule loc"] == "proven"  # counts positions itself
    assert any("sound: false" in line for line in chart.caption)
    assert any("single vote is right" in line for line in chart.caption)
    assert certified.recount_agrees(result)


@pytest.mark.parametrize("kind", ["rows", "double_masking"])
def test_charts_say_what_voted(tmp_path, kind):
    pairs = {"mask_patch": 2, "num_masks": 2}
    result = (
        made(tmp_path / "r")
        if kind == "rows"
        else made(tmp_path / "p", kind=kind, settings=pairs, claim={"patch_sizes": [1, 2]})
    )
    chart = certified.patch_chart(result, model="main", image_area=64)
    said = "bands of 3 rows" if kind == "rows" else "4 masks"
    assert any(said in line for line in chart.caption)
    assert len(chart.table.rows) == len(result.header["claim"]["patch_sizes"])
