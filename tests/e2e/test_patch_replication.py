"""The miniature replication of patch certificates: its figures, from counts made up here."""

from itertools import product

import pytest

from components.core.errors import CasemateError
from notebooks.replications import patches, runs
from tests.e2e.cli import ROOT

pytestmark = pytest.mark.e2e


def line(seed, model, size, stride, *, bent=False, vote, certified):
    return {
        "seed": seed, "certificate": f"{model}-b{size}-s{stride}", "model": model, "size": size,
        "stride": stride, "tokens": "drop", "bent": bent, "num_items": 200, "single": 0.5,
        "vote": vote, "certified": {"1": certified + 10, "2": certified, "3": certified // 2},
        "certified_loc": {"1": certified + 20, "2": certified + 5, "3": certified},
    }  # fmt: skip


@pytest.fixture(scope="module")
def lines():
    """The ViT certifies 4 points more than the ResNet; every pixel of size costs 1 point."""
    found = []
    for seed, model, size, stride in product((0, 1, 2), patches.MODELS, (2, 3, 4, 6), (1, 2, 4)):
        ahead = 0 if model == "resnet" else 8
        shape = {"vote": 120 + 2 * size + seed, "certified": 40 + ahead - 2 * size - stride}
        found.append(line(seed, model, size, stride, **shape))
    for seed, model in product((0, 1, 2), ("main", "masked")):
        found.append(line(seed, model, 3, 1, bent=True, vote=80, certified=10 + seed))
    return patches.Lines(found[::-1])  # in any order


def test_differences_are_those_of_the_counts(lines):
    networks, sizes, strides, tokens = patches.experiments_of(lines)
    assert networks.contrasts[0].difference.values == pytest.approx((4, 4, 4))
    assert networks.contrasts[0].verdict == "reproduced"
    assert sizes.contrasts[0].difference.values == pytest.approx((3, 3, 3))  # 6 of 200 votes
    assert sizes.contrasts[1].difference.values == pytest.approx((-3, -3, -3))
    assert strides.contrasts[0].difference.values == pytest.approx((-1.5, -1.5, -1.5))
    assert tokens.contrasts[0].verdict == "no difference seen"
    assert tokens.contrasts[1].difference.values == pytest.approx((-15.5, -15.0, -14.5))
    assert networks.table["ResNet"]["certified, 2x2"].mean == pytest.approx(16.5)  # 33 of 200
    assert networks.table["ResNet"]["certified, 2x2, rule loc"].mean == pytest.approx(19.0)


def test_the_page_has_the_published_layout_and_shares_of_the_image(lines):
    table = patches.sweep_table(lines)
    assert list(table.columns[:3]) == ["model", "size", "stride"]
    assert [name for name in table.columns if "0.4 %" in name or "3.5 %" in name] == [
        "certified, 1x1 px (0.4 % of the image), %",
        "certified, 3x3 px (3.5 % of the image), %",
    ]
    assert len(table) == 3 * 4 * 3
    text = patches.render(lines)
    assert "- Networks: **reproduced**" in text
    assert text == patches.render(patches.Lines(lines.lines[::-1]))
    assert patches.page.svg(patches.sweep_figure(lines)).count("<svg") == 1


def test_runs_that_are_not_finished_are_named(tmp_path):
    with pytest.raises(CasemateError, match=r"certify\.vit-b2-s1-\w+ is not finished; add --run"):
        patches.collect(tmp_path, 0)


def test_the_recipe_holds_what_the_page_compares():
    certificates = patches.recipe_of(1).certificates()
    shapes = {(e.section.model, e.section.band, e.section.stride) for e in certificates.values()}
    wide, sides = 2 * patches.TRAINED_SIZE, patches.load(patches.RECIPE).data.image_size
    for model in patches.MODELS:
        assert {(model, patches.TRAINED_SIZE, 1), (model, wide, 1)} <= shapes
    assert sides**2 == patches.NUM_PIXELS
    assert patches.recipe_of(1).train.objective.size == patches.TRAINED_SIZE


def test_the_stored_page_is_that_of_the_stored_counts():
    results = ROOT / "notebooks" / "results"
    lines = patches.Lines(runs.read(results / "patches.jsonl"))
    assert patches.render(lines) == (results / "patches.md").read_text()
