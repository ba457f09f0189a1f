"""Ranking and tables of made-up trials, against counts made by hand."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import binomtest

from components.core.errors import CasemateError
from components.data.prepared import PreparedDataset
from components.report.results import read_tune
from pipelines.cli.flow import show_search
from pipelines.recipe.load import loads, with_values
from pipelines.runtime.artifacts import StageDir
from pipelines.stages.tune import results as tr
from pipelines.stages.tune import stage as tune
from pipelines.stages.tune.outcome import search_outcome

BASE = """\
name: x
data: {source: digits}
train: {objective: {kind: fgsm, eps: 8/255}, epochs: 8}
"""
GRID = loads(BASE + "tune: {space: {train.weight_decay: [0, 1]}}\n", source="x")
ROBUST = tr.Comparison("val_robust_accuracy", num_items=100, num_clean=200, chance=0.2)
CLEAN = tr.Comparison("val_accuracy", num_items=200, num_clean=200, chance=0.2)


def trial(number, standing, clean=0.5, *, epochs=8, finished=True, stopped=None, values=None):
    """A trial that leaves the items standing whose places are listed."""
    verdicts = np.isin(np.arange(100), list(standing))
    figures = {} if stopped else {"val_accuracy": clean, "val_robust_accuracy": verdicts.mean()}
    text = "" if stopped else "".join("01"[v] for v in verdicts.astype(int))
    values = values or {"train.weight_decay": number}
    schedule = ({"epoch": 0, "values": values},)
    return tr.Trial(number, values, epochs, finished, stopped, figures, text, schedule)


def test_finished_trials_come_first_then_score_then_clean_accuracy():
    trials = [
        trial(0, range(40)), trial(1, range(40), clean=0.6),
        trial(2, range(90), epochs=2, finished=False), trial(3, (), stopped="label leaking"),
        trial(4, range(41)), trial(5, range(50), epochs=4, finished=False), trial(6, range(40)),
    ]  # fmt: skip
    ranked = tr.ranked(trials, metric="val_robust_accuracy")
    assert [t.number for t in ranked] == [4, 1, 0, 6, 5, 2, 3]


def test_rows_hold_exact_intervals_and_flag_what_noise_explains():
    trials = [
        trial(1, range(60), clean=0.8), trial(0, range(2, 61)), trial(3, range(45)),
        trial(2, range(60), epochs=2, finished=False), trial(4, (), stopped="label leaking"),
    ]  # fmt: skip
    table = tr.trials_table(GRID, trials, ROBUST)
    best, tied, told, early, failed = table["rows"]
    exact = binomtest(60, 100).proportion_ci(method="exact")
    share = best["val_robust_accuracy"]
    assert (share["value"], share["num_items"]) == (0.6, 100)
    assert share["low"] == pytest.approx(exact.low, abs=1e-12)
    assert share["high"] == pytest.approx(exact.high, abs=1e-12)
    assert best["val_accuracy"]["num_items"] == 200
    assert best["tied_with_best"]
    assert (tied["tied_with_best"], tied["difference_to_best"]["value"]) == (True, -0.01)
    assert not told["tied_with_best"]  # 15 items lost, none won
    assert binomtest(0, 15).pvalue < 0.05
    assert early["status"] == "stopped early"
    assert early["difference_to_best"] is None
    assert failed["status"] == "failed: label leaking"
    assert failed["val_robust_accuracy"] is None


def test_without_verdicts_shares_are_compared_as_two_samples():
    one, other = trial(0, (), clean=0.55), trial(1, (), clean=0.45)
    found = CLEAN.difference(one, other)
    assert found["value"] == pytest.approx(0.1)
    assert found["low"] < 0.1 - 0.09 < found["high"]  # 1.96 standard errors are 9.8 points
    assert CLEAN.share(one, "val_accuracy")["value"] == 110 / 200


def test_an_additive_table_compares_each_step_with_the_one_before():
    section = "tune: {changes: [{name: a}, {name: b, set: {train.weight_decay: 1}}, {name: c}]}\n"
    recipe = loads(BASE + section, source="x")
    trials = [trial(2, range(70)), trial(0, range(40)), trial(1, range(39))]
    table = tr.additive_table(recipe, trials, ROBUST)
    assert [row["name"] for row in table["rows"]] == ["a", "b", "c"]
    assert [row["set"] for row in table["rows"]] == [{}, {"train.weight_decay": 1}, {}]
    first, second, third = (row["difference"] for row in table["rows"])
    assert first is None
    assert second["value"] == pytest.approx(-0.01)
    assert second["low"] < 0 < second["high"]
    assert third["value"] == pytest.approx(0.31)
    assert third["low"] > 0
    assert [row["name"] for row in tr.trials_table(recipe, trials, ROBUST)["rows"]] == list("cab")


def test_a_failed_step_leaves_two_differences_open():
    section = "tune: {changes: [{name: a}, {name: b}, {name: c}]}\n"
    trials = [trial(0, range(40)), trial(2, range(40)), trial(1, (), stopped="leak")]
    rows = tr.additive_table(loads(BASE + section, source="x"), trials, ROBUST)["rows"]
    assert [row["difference"] for row in rows] == [None, None, None]


def test_the_best_recipe_runs_and_says_how_far_to_trust_it():
    trials = [trial(1, range(60)), trial(0, range(59))]
    text = tr.best_recipe(GRID, trials, ROBUST)
    best = loads(text, source="best")
    assert (best.name, best.tune, best.train.weight_decay) == ("x-tuned", None, 1)
    assert "# 1 further trials cannot be told" in text
    assert "shrunk" not in text
    small = loads(GRID.to_yaml(), source="x", smoke=True)
    assert "# A search in smoke size: this recipe is shrunk" in tr.best_recipe(
        small, trials, ROBUST
    )
    assert "retrain before" not in text


def test_a_best_trial_at_chance_is_told_in_its_recipe_and_by_commands(tmp_path, capsys):
    """Chance is the share of the most frequent label: 20 of these 100 items."""
    for held, at_chance in ((27, True), (29, False)):  # their intervals begin at 19.2 and 21.0
        trials = [trial(1, range(held)), trial(0, range(5), epochs=2, finished=False)]
        out = StageDir(tmp_path / str(held), "tune", "f" * 64, SimpleNamespace())
        tune.write(GRID, trials, ROBUST, out)
        assert ("It is at chance" in (out.path / "best.yaml").read_text()) == at_chance
        found = search_outcome(out.path, shown=out.path)
        assert found["at_chance"] == at_chance
        assert (found["trial"], found["num_trials"], found["num_stopped_early"]) == (1, 2, 1)
        assert found["score"]["value"] == held / 100
        show_search(found)
        shown = capsys.readouterr().out.splitlines()
        assert shown[0].startswith("val_robust_accuracy")
        (row,) = [r for r in read_tune("tune", out.path).trials if r.number == 1]
        assert f" {row.score.percent('attacked')[:-1]} %  95% [" in shown[0]  # as in the report
        assert "[{}, {}]".format(*row.score.interval().split(" to ")) in shown[0]
        assert shown[1] == "  best of 2 trials, 1 stopped early: train.weight_decay: 1"
        assert ("at chance" in shown[2]) == at_chance
        assert shown[-1] == f"  best recipe: {out.path / 'best.yaml'}"
        assert max(map(len, shown[:-1])) <= 100


def test_chance_is_the_most_frequent_label_of_the_items_that_are_compared(prepared):
    dataset = PreparedDataset.open(prepared)
    labels = dataset.load("val").labels
    for num_items in (6, len(labels)):
        recipe = with_values(GRID, {"tune.attack.num_items": num_items})
        expected = int(labels[:num_items].bincount().max()) / num_items
        assert tune.comparison(recipe, dataset).chance == expected


def test_a_schedule_is_kept_and_its_recipe_says_to_retrain(tmp_path):
    section = "space: {train.learning_rate: [0.1, 0.2]}, scheduler: {kind: pbt, interval: 2}"
    recipe = loads(f"{BASE}tune: {{{section}}}\n", source="x")
    best = trial(0, range(60), values={"train.learning_rate": 0.2})
    assert "retrain before" not in tr.best_recipe(recipe, [best], ROBUST)  # it had one value only
    before = {"epoch": 0, "values": {"train.learning_rate": 0.1}}
    trials = [replace(best, schedule=(before, *best.schedule)), trial(1, range(20))]
    out = StageDir(tmp_path, "tune", "f" * 64, SimpleNamespace())
    files = {path.name: path.read_text() for path in tune.write(recipe, trials, ROBUST, out)}
    assert files.keys() == {"trials.json", "pbt_schedule.json", "best.yaml"}
    assert '"train.learning_rate": 0.2' in files["pbt_schedule.json"]
    assert "retrain before you quote any figure" in files["best.yaml"]
    assert loads(files["best.yaml"], source="best").train.learning_rate == 0.2


def result(error=None, **last):
    config = {"point": {"trial": 0, "values": {"train.weight_decay": 0}}}
    kept = {"val_accuracy": 0.5, "val_robust_accuracy": 0.25}
    metrics = {"epochs": 3, "finished": True, "kept": kept, "standing": "0100", "schedule": []}
    return SimpleNamespace(config=config, metrics=metrics | last, error=error)


def test_a_trial_is_read_from_its_last_report():
    found = tr.read_trial(result())
    assert (found.epochs, found.finished, found.figures["val_robust_accuracy"]) == (3, True, 0.25)
    assert tr.robust_items(found).tolist() == [False, True, False, False]


def test_broken_trials_and_searches_without_result_are_errors():
    with pytest.raises(RuntimeError, match="1 of 2 trials failed: ValueError: no"):
        tune._finished([result(), result(error="x\nValueError: no\n")], metric="val_accuracy")
    with pytest.raises(CasemateError, match="no trial could be trained to its end: leak"):
        tune._finished([result(stopped="leak")], metric="val_accuracy")


def test_a_mistake_in_a_trial_is_the_line_that_it_was():
    mistake = CasemateError("model.options.depth", 7, "is odd")
    told = result(mistake=[mistake.key, str(mistake.value), mistake.remedy])
    ended = SimpleNamespace(config=None, metrics=None, error=None)  # by the mistake of the other
    with pytest.raises(CasemateError) as caught:
        tune._finished([ended, told], metric="val_accuracy")
    assert str(caught.value) == str(mistake)
