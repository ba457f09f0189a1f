"""Charts and galleries of analyses: right numbers, equal bytes, colours of the page, a phone."""

import base64
import io
import re

import numpy as np
import pytest
import torch
from PIL import Image

from components.analyze.gaps import GapState, densities
from components.evaluate.metrics import Measurement, null, share
from components.models.attention.gaps import LIMITS, GapHistogram
from components.report.analysis.charts import (
    alignment_table,
    correlation_chart,
    gap_chart,
    lesion_charts,
    restricted_charts,
    semantics_table,
    stage_borders,
)
from components.report.analysis.galleries import accumulation_gallery, perturbation_gallery
from components.report.content import Chapter, Check, Column, Content, Fact, Table
from components.report.page import render
from components.report.tables import to_csv
from tests.e2e.browser import check_page, find_chromium, visit

BLOCKS = ["layer1.0", "layer1.1", "layer2.0", "layer2.1", "layer3.0"]


def matrix(depth=5):
    values = 1 / (1 + np.abs(np.subtract.outer(np.arange(depth), np.arange(depth))))
    values[0, 2] = values[2, 0] = np.nan
    return values


def accuracy(right, item, level, metric="accuracy", flags=()):
    verdicts = np.arange(50) < right
    return share(verdicts, item=item, level=level, metric=metric, flags=flags)


def lesion_rows():
    found = [accuracy(45, "none", None)]
    for drop, part in enumerate(("block", "attn", "mlp"), start=1):
        for block in range(6):
            right = 10 if block == 0 else 45 - 3 * drop
            found.append(accuracy(right, part, block, "single_accuracy"))
        for count in (2, 3, 4, 5):
            values = {"mean": 0.8 - 0.1 * count, "min": 0.7 - 0.1 * count, "max": 0.9 - 0.1 * count}
            found += [
                Measurement(item=part, level=count, metric=f"{key}_accuracy", value=v, n=50)
                for key, v in values.items()
            ]
            found.append(Measurement(item=part, level=count, metric="num_sets", value=4, n=50))
            if count < 5:
                error = Measurement(item=part, level=count, metric="standard_error", value=0.02)
                found.append(error)
    return found


def restricted_rows(flags=()):
    near = [accuracy(20 + 7 * d, "spatial", d) for d in range(4)]
    random = [accuracy(10 + 10 * d, "random", d, flags=flags) for d in range(4)]
    depth = [accuracy(41 - 8 * k, "cls_first", k) for k in range(5)]
    return [*near, *random, *depth, *(accuracy(41 - k, "cls_last", k) for k in range(5))]


def gap_states():
    found = {}
    for images, centre in (("clean", 1.0), ("attacked", 2.0)):
        for scaling in ("before", "after"):
            for module in ("blocks.0.attn", "blocks.3.attn"):
                histogram = GapHistogram(LIMITS[torch.float32])
                generator = torch.Generator().manual_seed(0)
                scale = centre if scaling == "before" else 0.1 * centre
                histogram.add(scale * torch.rand(500, generator=generator).exp())
                found[f"{images}/{scaling}/{module}"] = GapState(histogram)
    return found


def gaps_chart():
    states = gap_states()
    rows = {key: densities(s.histogram, bins_per_decade=8) for key, s in states.items()}
    edges = next(iter(rows.values()))[0].tolist()
    shares = {key: values[1].tolist() for key, values in rows.items()}
    return gap_chart(edges, shares, limits=(16.65, 104.0), title="Gaps", name="gaps")


def all_charts():
    return [
        correlation_chart(matrix(), BLOCKS, title="Similarity", method="Linear CKA.", name="cka"),
        *lesion_charts(lesion_rows(), model="vit", name="lesions"),
        *restricted_charts(restricted_rows(), model="vit", name="attention"),
        gaps_chart(),
    ]


def galleries():
    rng = np.random.default_rng(0)
    images = rng.random((2, 3, 12, 12))
    names = ["cat", "dog", "owl"]
    return (
        perturbation_gallery(
            images,
            {"robust": rng.random((2, 3, 12, 12)), "standard": rng.random((2, 1, 12, 12))},
            np.array([2, 0]), classes=names, eps_text="4/255",
        ),
        accumulation_gallery(
            images, {"robust": (rng.random((2, 3, 12, 12)), np.array([0.5, 0.987]))},
            np.array([1, 0]), classes=names, preset_text="l-inf 15",
        ),
    )  # fmt: skip


def pixels_of(picture):
    """The (H, W) or (H, W, 3) pixels of a picture of the page."""
    data = base64.b64decode(picture.uri.partition(",")[2])
    return np.array(Image.open(io.BytesIO(data)))


def test_large_pictures_are_reduced_and_perturbations_gray():
    levels = np.arange(3 * 226 * 224).reshape(1, 3, 226, 224) % 251 / 250
    labels, names = np.array([0]), ["cat"]
    found = perturbation_gallery(levels, {"vit": levels}, labels, classes=names, eps_text="4/255")
    assert "A shown pixel is the mean of 3 x 3" in found.caption
    original, changed = (pixels_of(picture) for picture in found.strips[0].pictures)
    assert original.shape == (75, 74, 3)  # the last row and the last two columns are cut
    assert original[2, 5, 1] == round(255 * levels[0, 1, 6:9, 15:18].mean())
    luma = np.array([0.299, 0.587, 0.114]) @ levels[0, :, 6:9, 15:18].mean(axis=(1, 2))
    assert changed[2, 5] == pytest.approx(255 * luma, abs=0.51)
    small = accumulation_gallery(
        levels[..., :112, :112], {}, labels, classes=names, preset_text="l2"
    )
    assert "shown pixel" not in small.caption
    assert pixels_of(small.strips[0].pictures[0]).shape == (112, 112, 3)


def test_charts_have_their_numbers_in_tables():
    charts = {chart.name: chart for chart in all_charts()}
    assert list(charts) == [
        "cka", "lesions", "lesions-several", "attention-1", "attention-2", "gaps",
    ]  # fmt: skip
    cells = charts["cka"].table.rows
    assert cells[0][1] == 1
    assert cells[0][3] is None  # undefined
    assert "Mean of neighbouring blocks: 0.500." in charts["cka"].caption
    single = charts["lesions"]
    assert len(single.table.rows) == 18
    assert "whole block lowest at block 0 with 20.00%" in single.svg
    several = charts["lesions-several"].table.rows
    assert several[0][:3] == ("whole block", 2, 4)
    assert several[0][3:] == pytest.approx((0.6, 0.02, 0.5, 0.7))
    assert several[3][4] is None  # one set has no standard error
    near = [row[2].value for row in charts["attention-1"].table.rows if row[0].startswith("near")]
    assert near == [0.4, 0.54, 0.68, 0.82]
    signs = [entry.sign for entry in charts["attention-1"].legend]
    assert signs == ["line", "dash"]
    assert sum(row[-1] for row in charts["gaps"].table.rows) == pytest.approx(8)
    for chart in charts.values():
        assert to_csv(chart.table)


def test_equal_inputs_give_equal_bytes_in_the_colours_of_the_page():
    first, second = all_charts(), all_charts()
    for one, other in zip(first, second, strict=True):
        assert one.svg == other.svg
        assert not re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", one.svg)
    heat = first[0].svg
    assert len(re.findall(r"opacity: 0\.5[;\"]", heat)) >= 8  # neighbours share one colour
    assert galleries() == galleries()


def test_cells_show_their_value_as_opacity():
    values = np.full((3, 3), 0.25)
    svg = correlation_chart(values, ["a.0", "a.1", "a.2"], title="t", method="m", name="n").svg
    assert len(re.findall(r"opacity: 0\.25[;\"]", svg)) >= 9
    empty = correlation_chart(
        np.full((2, 2), np.nan), ["a.0", "a.1"], title="t", method="m", name="n"
    )
    assert "undefined" in empty.svg


def test_stages_are_bordered_where_names_change():
    assert stage_borders(BLOCKS) == [2, 4]
    assert stage_borders([f"blocks.{i}" for i in range(12)]) == []
    assert stage_borders(["layers.0.blocks.0", "layers.1.blocks.0"]) == [1]


def test_missing_studies_give_no_chart_and_flags_reach_the_caption():
    assert list(lesion_charts([], model="m", name="n")) == []
    assert list(restricted_charts([], model="m", name="n")) == []
    only = [row for row in restricted_rows() if row.item.startswith("cls")]
    assert [chart.name for chart in restricted_charts(only, model="m", name="n")] == ["n-2"]
    flagged = next(restricted_charts(restricted_rows(("no_prefix_token",)), model="m", name="n"))
    assert any("a patch always sees itself" in line for line in flagged.caption)


def test_tables_of_perturbations():
    rows = [
        accuracy(40, "convnext/plus", None, "top5_accuracy"),
        accuracy(5, "convnext/minus", None, "top5_accuracy"),
        Measurement(item="chance", metric="top5_accuracy", value=0.1),
    ]
    found = semantics_table({"robust": rows}, name="semantics")
    assert [row[:3] for row in found.rows] == [
        ("robust", "convnext", "x_adv - x"), ("robust", "convnext", "x - x_adv"),
    ]  # fmt: skip
    assert found.rows[0][3].value == 0.8
    assert found.rows[0][4] == 0.1
    place = {"item": "patch_alignment", "level": 8.0}
    rows = [
        Measurement(metric="score", value=1.4, n=10, **place),
        Measurement(metric="rank", value=1, n=10, **place),
        null(metric="z", why="nothing changes inside patches", **place),
    ]
    assert alignment_table({"vit": rows}, name="alignment").rows == (("vit", 8, 1.4, 1.0, None),)


def page():
    headline = Table("headline", (Column("Model"),), (("vit",),))
    tables = (semantics_table({}, name="semantics"),)
    chapter = Chapter(
        "analysis", "Why", "Inside the models.", charts=tuple(all_charts()),
        galleries=galleries(), tables=tables,
    )  # fmt: skip
    facts, checks = (Fact("run", "1"),), (Check(True, "fine"),)
    return render(Content("Report", "of a test", facts, headline, checks, (chapter,), "name: x"))


@pytest.mark.skipif(find_chromium() is None, reason="no chromium on this machine")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_phone(scheme, tmp_path):
    (tmp_path / "report.html").write_text(page(), encoding="utf-8")
    seen = visit(tmp_path / "report.html", width=390, height=844, scheme=scheme)
    check_page(seen, num_charts=6)
