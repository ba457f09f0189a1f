"""Patch certificates of every kind on the page: tables, sweeps, and what is not sound."""

import numpy as np
import pytest

from components.certify.certificate import write_certificate
from components.certify.vote_rows import VoteRow
from components.certify.votes import write_votes
from components.report import certified, patch_sweeps, patches, sweeps
from components.report.results import read_certify
from components.report.run_results import Results

SIDE, NUM_ITEMS = 8, 6


def made(folder, *, kind="rows", band=3, stride=1, settings=None, claim=None):
    """Votes of item i: class 1 wins all but i of them."""
    folder.mkdir(parents=True)
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


AREA = SIDE * SIDE


def swept(folder, shapes, **changes):
    """Certificates of one claim by size and stride, each with the sweep they make."""
    results = [
        made(folder / f"b{band}s{stride}", band=band, stride=stride, **changes)
        for band, stride in shapes
    ]
    return results, sweeps.find_sweeps(results, lambda _: "main")


def test_a_sweep_is_one_table_in_the_published_layout(tmp_path):
    results, (sweep,) = swept(tmp_path, [(3, 1), (2, 2), (2, 1)])
    table = patch_sweeps.sweep_table(sweep, lambda _: "main", image_area=AREA)
    assert [row[:3] for row in table.rows] == [("main", 1, 2), ("main", 1, 3), ("main", 2, 2)]
    assert [c.title for c in table.columns[1:]] == [
        "stride", "size", "without adversary", "certified"
    ]  # fmt: skip
    assert table.columns[4].detail == "1 \N{MULTIPLICATION SIGN} 1 px, 1.6%"  # 1 of 64 pixels
    assert table.rows[0][3:] == (
        certified.share(results[2].correct),
        certified.share(results[2].certified_at(1)),
    )
    assert sweeps.find_sweeps(results[:1], lambda _: "main") == ()


def test_a_family_without_charts_has_a_table(tmp_path):
    result = made(tmp_path / "a", claim={"patch_sizes": [1, 2], "rule": "count"})
    found = certified.chapter(Results(None, certificates=(result,)), [result], num_examples=4)
    (table,) = found.tables
    assert [row[3] for row in table.rows] == [
        certified.share(result.certified_at(size)) for size in (1, 2)
    ]
    assert result.family.proof_words({"rows"}) == found.intro


def test_other_claims_kinds_and_tokens_are_other_sweeps(tmp_path):
    strict = {"patch_sizes": [1], "rule": "strict"}
    bent = {"token_policy": "mask", "trained_token_policy": "drop"}
    results = [
        made(tmp_path / "a"),
        made(tmp_path / "b", band=2),
        made(tmp_path / "c", band=2, claim=strict),
        made(tmp_path / "d", band=2, kind="columns"),
        made(tmp_path / "e", settings={"band": 1, "stride": 1, **bent}),
    ]
    (sweep,) = sweeps.find_sweeps(results, lambda _: "main")
    assert [r.name for r in sweep.results] == ["certify.a", "certify.b"]
    assert [r.name for r in sweeps.own_charts(results, [sweep])] == [
        "certify.c", "certify.d", "certify.e"
    ]  # fmt: skip
    shown = sweeps.headline_results(results, [sweep], lambda _: "main")
    assert [r.name for r in shown] == ["certify.a", "certify.c", "certify.d", "certify.e"]
    assert sweeps.headline_detail(results[0], "3 px", [sweep]) == "3 px, size 3, stride 1"
    assert sweeps.headline_detail(results[2], "3 px", [sweep]) == "3 px"


def test_charts_follow_size_and_stride_where_there_are_several(tmp_path):
    _, (sweep,) = swept(tmp_path, [(2, 1), (3, 1), (4, 1), (2, 2), (2, 4)])
    by_size, by_stride = patch_sweeps.sweep_charts(sweep, lambda _: "main", image_area=AREA)
    assert "by size, stride 1 px" in by_size.title
    assert "by stride, size 2 px" in by_stride.title
    assert 'aria-label="Certified accuracy by size. ' in by_size.svg
    assert "var(--proven" in by_size.svg
    assert any("on other items than these" in line for line in by_size.caption)
    _, (only,) = swept(tmp_path / "sizes", [(2, 1), (3, 1)])
    assert len(patch_sweeps.sweep_charts(only, lambda _: "main", image_area=AREA)) == 1


def test_models_are_compared_at_one_patch(tmp_path):
    claim = {"patch_sizes": [1, 2], "rule": "count"}
    results, (sweep,) = swept(tmp_path, [(2, 1), (3, 1), (2, 2), (3, 2)], claim=claim)
    names = {result.name: f"net-{result.name[-1]}" for result in results}  # by stride
    (chart,) = patch_sweeps.sweep_charts(
        sweep, lambda result: names[result.name], image_area=AREA
    )[:1]  # fmt: skip
    (alone,) = patch_sweeps.sweep_charts(sweep, lambda _: "main", image_area=AREA)[:1]
    assert "patches of 1" in chart.caption[0]
    assert "patches of 1" in alone.caption[0]
    assert "2 \N{MULTIPLICATION SIGN} 2 px" in alone.caption[0]


def test_an_unsound_sweep_says_so_and_has_no_colour_of_proof(tmp_path):
    claim = {"patch_sizes": [1], "rule": "count", "delta_rule": "paper_reference"}
    _, (sweep,) = swept(tmp_path, [(3, 1), (3, 3)], claim=claim)
    (chart,) = patch_sweeps.sweep_charts(sweep, lambda _: "main", image_area=AREA)
    assert chart.caption[0].startswith("sound: false")
    assert "--proven" not in chart.svg
    assert {sign.colour for sign in chart.legend} == {"measured"}
    table = patch_sweeps.sweep_table(sweep, lambda _: "main", image_area=AREA)
    assert table.columns[-1].kind == "measured"
    assert "not sound" in table.columns[-1].title


def test_what_is_not_sound_is_never_set_as_proven(tmp_path):
    claim = {"patch_sizes": [1], "rule": "count", "delta_rule": "paper_reference",
             "second_rule": "loc"}  # fmt: skip
    result = made(tmp_path / "paper", stride=3, claim=claim)
    chart = patches.patch_chart(result, model="main", image_area=64)
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
    chart = patches.patch_chart(result, model="main", image_area=64)
    said = "bands of 3 rows" if kind == "rows" else "4 masks"
    assert any(said in line for line in chart.caption)
    assert len(chart.table.rows) == len(result.document.claim["patch_sizes"])
