"""Chapters of evaluation suites: every number is the table's, whatever part is missing."""

import csv
import io
import re
from dataclasses import replace

import pytest

from components.core.errors import CasemateError
from components.evaluate.metrics import METRICS_NAME, MetricRow
from components.report.content import Accuracy, Column, Content, Missing, Table
from components.report.evaluation import overview
from components.report.evaluation.chapters import SUITES, Evaluation, chapters, read_evaluation
from components.report.evaluation.comparisons import significance
from components.report.evaluation.headline import with_evaluation
from components.report.evaluation.rows import suite_rows
from components.report.evaluation.signs import MAX_MODELS, sign_of
from components.report.evaluation.transfer import letter
from components.report.page import render
from components.report.tables import to_csv
from pipelines.stages.report.stage import build_content
from tests.e2e.browser import find_chromium, visit
from tests.unit.report.evaluated import (
    MODELS,
    made_failures,
    made_rows,
    write_evaluation,
)

EMPTY = Table("headline", (Column("Model"),), ())


@pytest.fixture(scope="module")
def rows():
    return made_rows()


@pytest.fixture(scope="module")
def found(rows):
    return {chapter.anchor: chapter for chapter in chapters(Evaluation(rows, made_failures()))}


@pytest.fixture(scope="module")
def page(found):
    return render(content(found.values()))


def content(shown):
    return Content("t", "s", (), EMPTY, (), tuple(shown), "recipe")


def tables_of(chapter):
    return [*(chart.table for chart in chapter.charts), *chapter.tables]


def numbers(table):
    """Every number of a table: of accuracies the share, both ends of the interval and n."""
    for line in table.rows:
        for value in line:
            if isinstance(value, Accuracy):
                yield from (value.value, value.low, value.high, value.num_items)
            elif isinstance(value, int | float):
                yield value


def known_numbers(rows):
    """What a table may show: numbers of rows, in percent too, bins and poses of the map."""
    known = {0.0, *map(float, range(1, 100))}  # numbers of bins, severities, angles and counts
    for row in rows:
        plain = (row.value, row.lo95, row.hi95, row.n, row.params_m, row.gmacs, row.level)
        for value in plain:
            if value is not None:
                known |= {float(value), 100 * float(value)}
    known |= {place / 10 for place in range(11)}  # edges of ten bins
    known |= {float(v) for t in made_failures().values() for c in t.columns for v in c.to_pylist()}
    return {round(value, 9) for value in known}


def test_every_number_of_every_table_is_a_row_of_the_file(found, rows):
    known = known_numbers(rows)
    shown = [
        n for chapter in found.values() for table in tables_of(chapter) for n in numbers(table)
    ]
    assert len(shown) > 1000
    assert {n for n in shown if round(n, 9) not in known} == set()


def test_every_figure_has_its_table_and_says_what_it_shows(found):
    assert list(found) == [
        *("evaluation", "clean", "corruptions", "shifts", "shape", "transfer", "spatial"),
    ]
    for chapter in found.values():
        assert chapter.charts
        for chart in chapter.charts:
            assert chart.table.rows
            assert chart.legend
            assert chart.caption
            assert 'aria-label=""' not in chart.svg
            assert "items" in " ".join(chart.caption) or chapter.anchor == "evaluation"
    content(found.values()).tables()  # names are unique


def test_equal_rows_give_equal_bytes(page):
    again = chapters(Evaluation(made_rows(), made_failures()))
    assert render(content(again)) == page


@pytest.mark.parametrize("suites", [*[(name,) for name in SUITES], ("shifts", "spatial"), ()])
def test_any_subset_of_suites_renders(rows, suites):
    kept = tuple(row for row in rows if row.suite in suites)
    shown = [chapter.anchor for chapter in chapters(Evaluation(kept, made_failures()))]
    anchors = {"shape_bias": "shape"}
    overview_too = ["evaluation"] if len(suites) > 1 else []
    assert shown == overview_too + [anchors.get(name, name) for name in suites]


def test_one_model_without_failure_maps_renders(rows):
    one = tuple(row for row in made_rows(full=False) if row.model == "vit-b")
    shown = {chapter.anchor: chapter for chapter in chapters(Evaluation(one))}
    (only,) = shown["spatial"].charts
    assert "early exit evaluates part of a grid" in str(only.table.rows)
    assert len(shown["corruptions"].charts) == 1  # lines need several models


def test_missing_numbers_are_empty_and_say_why(found, page):
    scores = {t.name: t for t in found["corruptions"].tables}["evaluate.corruptions.scores"]
    titles = [column.title for column in scores.columns]
    by_model = {line[0]: dict(zip(titles, line, strict=True)) for line in scores.rows}
    assert by_model["rn-50"]["mean95"] is None
    assert "lacks spatter/1" in by_model["rn-50"]["Note"]
    assert by_model["vit-b"]["mean95"] is not None
    assert all(line["mCE"] is None for line in by_model.values())
    assert "procedural textures" in by_model["vit-b"]["Note"]
    matrix = found["transfer"].charts[0].table
    across = [line for line in matrix.rows if line[:2] == ("rn-50", "vit-b")]
    assert across[0][3] == Missing()
    assert across[0][-1] == "the source takes 3x16x16, the target 3x8x8"
    assert re.search(r'<td class="num"[^>]*><span>none</span></td>', page)
    assert "no items" in page  # the class without items


def test_csv_has_the_numbers_in_full(found):
    heat = found["corruptions"].charts[0].table
    rows = list(csv.DictReader(io.StringIO(to_csv(heat))))
    assert float(rows[0]["severity 1 value"]) == heat.rows[0][2].value
    assert rows[0]["severity 1 num_items"] == "40"
    rates = found["transfer"].charts[1].table
    empty = [row for row in csv.DictReader(io.StringIO(to_csv(rates))) if row["Note"]]
    assert empty
    assert {row["transfer rate value"] for row in empty} == {""}


def test_comparisons_appear_once_with_marks(found):
    table = {t.name: t for t in found["clean"].tables}["evaluate.clean.compared"]
    pairs = [frozenset(line[1:3]) for line in table.rows]
    assert len(set(pairs)) == len(pairs) == 3
    assert [significance(p) for p in (None, 0.2, 0.04, 0.009, 0.0001)] == [
        *("-", "not significant", "*", "**", "***"),
    ]


def test_headline_keeps_what_other_stages_measured(rows):
    clean, proven = Column("Clean", "measured"), Column("Certified l2", "proven")
    mine = Accuracy(0.5, 0.4, 0.6, 99)
    before = Table("headline", (Column("Model"), clean, proven), (("vit-b", mine, mine),))
    after = with_evaluation(before, Evaluation(rows))
    lines = {line[0]: dict(zip(after.columns, line, strict=True)) for line in after.rows}
    assert set(lines) == set(MODELS)
    assert lines["vit-b"][clean] == mine
    assert lines["vit-l"][proven] is None
    white_box = [c for c in after.columns if c.title == "White box"]
    assert [c.detail for c in white_box] == ["FGSM, eps 1/255", "PGD, eps 1/255"]
    assert all(lines[model][c] is not None for model in MODELS for c in white_box)
    assert with_evaluation(before, Evaluation()) is before


def test_settings_are_never_mixed_in_one_chart(rows):
    own = [row for row in rows if (row.suite, row.model) == ("corruptions", "vit-b")]
    both = (*own, *(replace(row, resize="timm") for row in own))
    assert [part.setting for part in suite_rows(both, "corruptions")] == [
        *("resize squash", "resize timm"),
    ]
    (shown,) = chapters(Evaluation(both))
    assert [chart.title.rpartition("(")[2] for chart in shown.charts] == [
        *("resize squash)", "resize timm)"),
    ]
    content([shown]).tables()  # names are unique
    assert Evaluation(both).single() == {}


def test_two_models_of_one_name_are_told_apart(rows):
    twin = [replace(row, model_digest="f" * 64) for row in rows if row.model == "vit-b"]
    (part,) = suite_rows([*rows, *twin], "clean")
    assert [m for m in part.models if m.startswith("vit-b")] == ["vit-b ffffffff", "vit-b vit-b000"]


def test_models_beyond_the_signs_are_in_the_table_only(rows):
    many = [
        replace(row, model=f"m{i}", model_digest=f"{i}" * 64)
        for i in range(MAX_MODELS + 2)
        for row in rows
        if row.model == "vit-b" and row.suite == "shape_bias"
    ]
    (chapter,) = chapters(Evaluation(tuple(many)))
    assert "2 more models are in the table only." in chapter.charts[0].caption
    assert len(chapter.charts[0].table.rows) == MAX_MODELS + 2
    assert len({sign_of(n) for n in range(MAX_MODELS)}) == MAX_MODELS
    assert [letter(n) for n in (0, 25, 26, 52)] == ["A", "Z", "AA", "BA"]


def test_written_steps_are_read_back(tmp_path, rows):
    folders = write_evaluation(tmp_path)
    found = read_evaluation({**folders, "train.main": tmp_path})
    key = MetricRow.__repr__
    assert sorted(found.rows, key=key) == sorted(rows, key=key)
    assert found.failures.keys() == MODELS.keys()
    (spatial,) = chapters(
        replace(found, rows=tuple(row for row in found.rows if row.suite == "spatial"))
    )
    assert sum(chart.title.endswith("degrees") for chart in spatial.charts) == len(MODELS)
    (folders["evaluate.clean"] / METRICS_NAME).write_bytes(b"broken")
    with pytest.raises(CasemateError, match=r"evaluate.clean.*damaged.*run this step again"):
        read_evaluation(folders)


def test_the_stage_shows_evaluations_beside_other_results(finished, out, recipe, tmp_path):
    inputs = {"prepare": finished["prepare"], "attack.linf": finished["attack.linf"]}
    steps = write_evaluation(tmp_path)
    some = {name: steps[f"evaluate.{name}"] for name in ("clean", "shifts")}
    shown = build_content(recipe, inputs | {f"evaluate.{n}": f for n, f in some.items()}, out)
    anchors = [chapter.anchor for chapter in shown.chapters]
    assert anchors[:4] == ["attacks", "evaluation", "clean", "shifts"]
    assert [line[0] for line in shown.headline.rows][:2] == ["main", "standard"]
    assert {line[0] for line in shown.headline.rows[2:]} == set(MODELS)
    assert len({table.name for table in shown.tables()}) == len(shown.tables())


def test_pairs_have_the_layout_of_the_paper(found):
    (table, *_) = [t for t in found["transfer"].tables if t.name.endswith("pairs-2")]
    titles = [column.title for column in table.columns]
    assert titles[3:10] == [
        *("A clean", "B clean", "A to A", "B to B", "A to B", "drop", "B to A"),
    ]
    assert [line[:2] for line in table.rows] == [("vit-b", "rn-50"), ("vit-l", "rn-50")]


def test_overview_needs_more_than_clean_items(rows):
    assert overview.chapter(Evaluation(rows[:0]).single()) is None
    clean = tuple(row for row in rows if row.suite == "clean")
    assert overview.chapter(Evaluation(clean).single()) is None


@pytest.mark.skipif(find_chromium() is None, reason="no browser on this machine")
def test_charts_fit_a_phone(found, page, tmp_path):
    (tmp_path / "r.html").write_text(page, encoding="utf-8")
    seen = visit(tmp_path / "r.html", width=390, height=844, scheme="dark")
    assert seen.errors == seen.requests == ()
    assert seen.scroll_width <= seen.inner_width
    assert seen.smallest_chart_text >= 10
    assert len(seen.figures) == sum(len(chapter.charts) for chapter in found.values())
