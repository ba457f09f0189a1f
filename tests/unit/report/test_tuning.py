"""The chapter on tuning: what its tables and charts say about made-up trials."""

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.core.errors import CasemateError
from components.core.statistics import clopper_pearson_interval
from components.report import tuning, tuning_figures
from components.report.content import Accuracy
from components.report.records import AddedStep, TunedTrial, TuneResult
from components.report.results import read_tune

FGSM, PGD = {"kind": "fgsm", "eps": "4/255"}, {"kind": "pgd", "eps": "4/255", "num_steps": 2}
SPACE = {
    "train.objective": [FGSM, PGD],
    "train.weight_decay": [0, 0.05, 0.5],
    "train.learning_rate": {"kind": "loguniform", "low": 1e-4, "high": 1e-2},
}


def share(k: int, n: int = 50) -> Accuracy:
    return Accuracy(k / n, *clopper_pearson_interval(k, n), n)


def trial(number, held, *, objective=FGSM, decay=0.05, rate=1e-3, status="finished", tied=False):
    values = {
        "train.objective": objective,
        "train.weight_decay": decay,
        "train.learning_rate": rate,
    }
    score = share(held) if held is not None else None
    return TunedTrial(number, None, values, score, score and share(45), 4, status, tied)


TRIALS = (
    trial(3, 40),
    trial(0, 39, objective=PGD, tied=True),
    trial(2, 20, decay=0, rate=1e-4),
    trial(1, 45, decay=0.5, rate=1e-2, status="stopped early"),
    trial(4, None, status="failed: label leaking"),
)
ATTACK = {"kind": "apgd-ce", "num_steps": 20, "num_items": 50}
FOUND = TuneResult("val_robust_accuracy", "asha", ATTACK, SPACE, TRIALS)
STEPS = (
    AddedStep("XCiT-S12", {}, share(20), share(40), None),
    AddedStep("+ warm-up", {"train.objective.eps_warmup_epochs": 10}, share(24), share(41),
              (0.08, -0.03, 0.19)),
    AddedStep("+ decay", {"train.weight_decay": 0.5}, None, None, None),
)  # fmt: skip


def parsed(svg: str) -> ET.Element:
    return ET.fromstring(svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1))


def texts(svg: str) -> set[str]:
    return {(node.text or "").strip() for node in parsed(svg).iter() if node.tag.endswith("text")}


def test_the_first_trial_is_the_best_and_ties_are_named():
    chapter = tuning.chapter(FOUND)
    (table,) = chapter.tables
    assert (table.marked, table.rows[0][0]) == (0, 3)
    assert [row[-1] for row in table.rows] == [
        "-", "no: a tie", "yes", "not compared", "not compared",
    ]  # fmt: skip
    titles = [column.title for column in table.columns]
    assert table.rows[0][titles.index("under attack")] == share(40)
    assert table.rows[4][titles.index("under attack")] is None
    assert "kind = pgd" in table.rows[1][titles.index("train.objective")]
    assert "5 trials, compared by val_robust_accuracy on 50 validation items." in chapter.intro
    assert "Ties with the best: 1;" in chapter.intro
    assert "schedule" not in chapter.intro


def test_one_chart_for_all_keys_and_one_for_each():
    charts = tuning.chapter(FOUND).charts
    assert [chart.name for chart in charts] == ["tune.parallel", *(f"tune.{key}" for key in SPACE)]
    assert {"fgsm", "pgd", "0", "0.05", "0.5", "0.0001", "0.001", "0.01"} <= texts(charts[0].svg)
    assert {"0", "0.05", "0.5"} <= texts(charts[2].svg)
    assert all(chart.svg == again.svg for chart, again in zip(charts, tuning.chapter(FOUND).charts,
                                                              strict=True))  # fmt: skip


def test_a_grid_of_two_keys_is_a_heat_map_of_all_its_cells():
    keys = ("train.objective", "train.weight_decay")
    trials = tuple(
        replace(t, values={key: t.values[key] for key in keys}) for t in TRIALS if t.number != 4
    )
    grid = replace(FOUND, space={key: SPACE[key] for key in keys}, trials=trials)
    charts = tuning.chapter(grid).charts
    assert [chart.name for chart in charts] == ["tune.heat", *(f"tune.{key}" for key in keys)]
    shown = texts(charts[0].svg)
    assert {"fgsm", "pgd", "0", "0.05", "0.5", *keys} <= shown
    assert {"80.00", "78.00", "40.00", "90.00*"} <= shown  # the star: stopped early
    assert share(40).interval() in shown
    assert sum(text == "–" for text in (n.text for n in parsed(charts[0].svg).iter())) == 2  # noqa: RUF001
    assert "weight_decay = 0.05" in charts[0].caption[0]
    drawn = replace(grid, space={**grid.space, keys[1]: SPACE["train.learning_rate"]})
    other = [replace(t, values=t.values | {keys[1]: 1e-3}) for t in trials]
    names = [chart.name for chart in tuning.chapter(replace(drawn, trials=tuple(other))).charts]
    assert names[0] == "tune.parallel"


def test_a_search_whose_best_trial_is_at_chance_says_so():
    low = share(40).low
    for chance, at_chance in ((None, False), (low - 1e-9, False), (low, True), (0.9, True)):
        found = replace(FOUND, chance=chance)
        assert tuning.is_at_chance(found) == at_chance
        assert ("at chance" in tuning.chapter(found).intro) == at_chance


def test_every_trial_with_a_score_is_a_line_and_the_best_one_is_highlighted():
    svg = tuning.chapter(FOUND).charts[0].svg
    strokes = re.findall(r"stroke: var\(--(\w+),[^)]*\)(?:[^\"]*)\"", svg)
    lines = [s for s in re.findall(r'style="([^"]*)"', svg) if "stroke-width: 2.4" in s]
    assert len(lines) == 1
    assert "--attacked" in lines[0]
    assert strokes.count("attacked") == 1
    assert len([s for s in re.findall(r'style="([^"]*)"', svg) if "stroke-opacity: 0.55" in s]) == 3


def test_a_trial_lies_where_its_value_is():
    shown = [t for t in TRIALS if t.score]
    decay = tuning_figures.axis_of("train.weight_decay", SPACE["train.weight_decay"], shown)
    assert decay.places == (0.5, 0.5, 0.0, 1.0)
    rate = tuning_figures.axis_of("train.learning_rate", SPACE["train.learning_rate"], shown)
    assert rate.places == pytest.approx((0.5, 0.5, 0.0, 1.0))
    assert [label for _, label in rate.ticks] == ["0.0001", "0.001", "0.01"]


def test_a_chain_has_its_table_with_differences_in_points():
    chapter = tuning.chapter(replace(FOUND, space={}, steps=STEPS))
    additive, trials = chapter.tables
    assert (additive.name, trials.name) == ("additive", "trials")
    assert [row[0] for row in additive.rows] == ["XCiT-S12", "+ warm-up", "+ decay"]
    assert additive.rows[0][-3:] == (None, None, None)
    assert additive.rows[1][-3:] == pytest.approx((8.0, -3.0, 19.0))
    assert [chart.name for chart in chapter.charts] == ["tune.additive"]
    assert {"XCiT-S12", "+ warm-up"} <= texts(chapter.charts[0].svg)


def test_a_schedule_is_not_sold_as_a_recipe():
    assert "train it again" in tuning.chapter(replace(FOUND, scheduler="pbt")).intro


def test_clean_accuracy_is_shown_once_where_it_decides():
    chapter = tuning.chapter(replace(FOUND, metric="val_accuracy"))
    titles = [column.title for column in chapter.tables[0].columns]
    assert titles.count("clean") == 1
    assert "under attack" not in titles
    assert "apgd-ce" not in chapter.intro


def test_only_failed_trials_make_a_table_without_charts():
    failed = replace(FOUND, trials=TRIALS[4:])
    assert tuning.chapter(failed).charts == ()


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([FGSM, PGD], ["fgsm", "pgd"]),
        ([FGSM, {**FGSM, "eps": "8/255"}], ["eps = 4/255", "eps = 8/255"]),
        ([{"kind": "ema", "decay": 0.9}, None], ["ema", "none"]),
        ([True, False], ["on", "off"]),
        ([0, 0.001, 1e-5], ["0", "0.001", "1e-05"]),
        (["rand-m9-mstd0.5-inc1", None], ["rand-m9-mstd0.5-i…", "none"]),
        (["a" * 30 + "b", "a" * 30 + "c"], ["1: " + "a" * 15, "2: " + "a" * 15]),
    ],
)
def test_values_have_short_labels_that_differ(values, labels):
    assert tuning_figures.value_labels(values) == labels


@given(st.lists(st.dictionaries(st.sampled_from(["kind", "eps", "x"]), st.integers(0, 3)),
                min_size=1, max_size=6, unique_by=str))  # fmt: skip
def test_labels_of_different_sections_differ_and_stay_short(values):
    labels = tuning_figures.value_labels(values)
    assert len(set(labels)) == len(values)
    assert all(len(label) <= tuning_figures.LABEL for label in labels)


def test_hostile_names_stay_text():
    hostile = '<script>alert("x")</script> & $\\frac{1}{0}$'
    steps = (replace(STEPS[0], name=hostile),)
    (chart,) = tuning.chapter(replace(FOUND, space={}, steps=steps)).charts
    assert not [node for node in parsed(chart.svg).iter() if node.tag.endswith("script")]
    assert any(text.startswith("<script>") for text in texts(chart.svg))


def test_files_are_read_back_and_gaps_are_named(finished, tmp_path):
    found = read_tune("tune", finished["tune"])
    assert [(t.number, t.tied) for t in found.trials] == [(1, True), (0, True), (2, False)]
    assert found.trials[2].score is None
    page = json.loads((finished["tune"] / "trials.json").read_text())
    del page["rows"][0]["status"]
    (tmp_path / "trials.json").write_text(json.dumps(page))
    with pytest.raises(CasemateError, match="lacks status"):
        read_tune("tune", tmp_path)
