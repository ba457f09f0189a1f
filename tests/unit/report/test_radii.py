"""l2 certificates side by side on the page: envelope, spread of bounds, tables of others."""

import numpy as np
import pytest

from components.certify.certificate import write_certificate
from components.certify.l2.cohen_tsv import CohenRow, read_published, write_cohen_tsv
from components.certify.l2.curves import average_certified_radius
from components.certify.l2.settings import PublishedRadiiSettings
from components.certify.vote_rows import VoteRow
from components.certify.votes import write_votes
from components.report import certified, radii
from components.report.radius_figures import RadiusLine, envelope_line
from components.report.results import read_certify

NUM_ITEMS, N = 8, 300
RADII = [0.1, 0.3, 0.6]


def made(folder, *, sigma, wrong):
    """Item i: 4 * i * wrong of its draws disagree with its label, 1."""
    folder.mkdir()
    rows = []
    for i in range(NUM_ITEMS):
        for stream, size in (("select", 20), ("estimate", N)):
            votes = np.ones(size, np.uint16)
            votes[: min(size // 2, 4 * i * wrong)] = 0
            rows.append(VoteRow(f"item-{i}", 1, "0" * 64, stream, 0, size, votes))
    header = {
        "kind": "gaussian", "run_id": "made", "model_digest": "a", "dataset_digest": "d",
        "num_classes": 2, "image": {"channels": 1, "height": 8, "width": 8},
        "settings": {"sigma": sigma, "num_select": 20, "num_estimate": N, "run_seed": 0,
                     "method": "fixed"},
        "noise_impl": "made", "num_items": NUM_ITEMS, "software": {},
    }  # fmt: skip
    votes_file = write_votes(folder / "votes.parquet", rows, header)
    write_certificate(folder, votes_file, {"failure_prob": 0.001, "radii": RADII})
    return read_certify(f"certify.{folder.name}", folder)


@pytest.fixture
def pair(tmp_path):
    return [
        made(tmp_path / "low", sigma=0.25, wrong=1),
        made(tmp_path / "high", sigma=0.5, wrong=5),
    ]


@pytest.fixture
def other(tmp_path):
    path = tmp_path / "theirs.tsv"
    write_cohen_tsv(path, [CohenRow(i, 1, 1, 0.2 * i, 0.2 * i) for i in range(10)])
    return path


def cells(table):
    return {c.title: [row[i] for row in table.rows] for i, c in enumerate(table.columns)}


def test_the_envelope_is_the_best_certificate_at_each_radius(pair):
    (chart,) = radii.curves_charts(pair, model_of=lambda _: "main", published=())
    found = cells(chart.table)
    assert found["radius"] == [0.0, *RADII]
    for row, r in enumerate(found["radius"]):
        shares = [certified.share(p.certified_at(r)).value for p in pair]
        assert found["envelope"][row] == max(shares)
        assert found["best sigma"][row] == (0.25 if shares[0] >= shares[1] else 0.5)
    assert len(set(found["best sigma"])) == 2
    assert any("optimistic" in line for line in chart.caption)
    assert "certify.high, sigma 0.5" in chart.svg


def test_one_sigma_alone_has_no_envelope(pair, tmp_path):
    same = made(tmp_path / "again", sigma=0.25, wrong=2)
    assert radii.curves_charts(pair[:1], model_of=lambda _: "main", published=()) == ()
    assert radii.curves_charts([pair[0], same], model_of=lambda _: "main", published=()) == ()


def test_certificates_of_other_items_are_not_mixed(pair, tmp_path):
    pair[1].columns["item_id"] = [f"else-{i}" for i in range(NUM_ITEMS)]
    assert radii.curves_charts(pair, model_of=lambda _: "main", published=()) == ()


def test_tables_of_others_are_shown_beside_and_doubted(pair, other):
    theirs = read_published(
        "cohen", PublishedRadiiSettings(path=str(other), sigma=0.25, num_estimate=N)
    )
    assert any("exceeds the possible" in problem for problem in theirs.problems)
    (chart,) = radii.curves_charts(pair[:1], model_of=lambda _: "main", published=(theirs,))
    found = cells(chart.table)
    assert [a.value for a in found["cohen"]] == [
        np.mean([0.2 * i - 5e-7 >= r for i in range(10)]) if r else 1.0 for r in found["radius"]
    ]
    assert {c.kind for c in chart.table.columns if c.title == "cohen"} == {"measured"}  # not ours
    assert any("cohen: idx" in line for line in chart.caption)
    assert read_published("cohen", PublishedRadiiSettings(path=str(other))).problems == ()


def test_figures_are_those_of_the_items(pair):
    found = cells(radii.figures_table(pair, lambda _: "main"))
    assert found["sigma"] == [0.25, 0.5]
    for i, result in enumerate(pair):
        radius = np.array(result.columns["radius"])
        assert found["average certified radius"][i] == average_certified_radius(
            result.correct, radius
        )
        assert found["right label"][i].value == np.mean(np.array(result.columns["predicted"]) == 1)
        assert found["right label"][i].value >= found["right, not abstained"][i].value


def test_bounds_of_all_items_are_in_the_picture(pair):
    chart = radii.bound_chart(pair[1], model="main")
    found = cells(chart.table)
    assert sum(found["items"]) == NUM_ITEMS
    low = sum(bound <= 0.5 for bound in pair[1].columns["p_lower"])
    assert f"{low} of {NUM_ITEMS} items" in chart.caption[0]
    assert low > 0


def test_the_drawn_envelope_follows_the_highest_line():
    a = RadiusLine("a", np.array([0.2, 0.5]), np.array([0.9, 0.4]))
    b = RadiusLine("b", np.array([0.3, 0.8]), np.array([0.7, 0.3]))
    found = envelope_line([a, b])
    assert found.radii.tolist() == [0.2, 0.3, 0.5, 0.8]
    assert found.share.tolist() == [0.9, 0.7, 0.4, 0.3]
