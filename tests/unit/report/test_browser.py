"""The rendered page in a real browser, on a desk and on a phone."""

from dataclasses import replace

import pytest

from components.report.content import (
    Accuracy,
    Chapter,
    Chart,
    Check,
    Column,
    Content,
    Fact,
    Gallery,
    LegendEntry,
    Picture,
    Strip,
    Table,
)
from components.report.figures import attack_bars
from components.report.page import render
from tests.e2e.browser import check_page, find_chromium, visit

pytestmark = pytest.mark.skipif(
    find_chromium() is None, reason="no chromium, chromium-browser or google-chrome on this machine"
)


def test_page_is_whole_and_fits(page, tmp_path):
    (tmp_path / "report.html").write_text(page, encoding="utf-8")
    seen = visit(tmp_path / "report.html", width=390, height=844, scheme="dark")
    check_page(seen, num_charts=15)


@pytest.mark.parametrize("width", [1280, 700, 390])
def test_long_names_and_many_columns_do_not_push_the_page_wide(width, tmp_path):
    half, name = Accuracy(0.5, 0.4, 0.6, 100), "x" * 150
    proven = [Column("Certified patch", "proven", f"{name[:60]} {i}") for i in range(9)]
    headline = Table("headline", (Column("Model"), *proven), ((name, *[half] * 9),))
    svg = attack_bars([name], clean=[half], attacked=[half], name="bars", alt=name)
    legend = (LegendEntry(name, "attacked", "bar"),)
    chapter = Chapter(
        "s", name, name, charts=(Chart("c", name, svg, legend, (name,), headline),),
        galleries=(Gallery(name, name, (Strip(name, (Picture("data:,", name, name),)),)),),
        tables=(replace(headline, name="wide"),), facts=(Fact(name, name), Fact(name, name, True)),
    )  # fmt: skip
    checks = (Check(False, name),)
    page = Content(name, name, (Fact(name, name),), headline, checks, (chapter,), name * 3)
    (tmp_path / "long.html").write_text(render(page), encoding="utf-8")
    seen = visit(tmp_path / "long.html", width=width, height=900)
    assert seen.scroll_width <= seen.inner_width
