"""What the report says about the run: classes, steps, published figures, names of attacks."""

from types import SimpleNamespace

import numpy as np
import pytest

from components.report.classes import confusion
from components.report.content import Link
from components.report.execution import StepExecution, duration, facts, steps_table
from components.report.page import render
from components.report.wording import attack_list_words, attack_name, pixels
from pipelines.recipe.load import header, load
from pipelines.stages.report.stage import build_content


def ran(step, *, seconds=90.0, page=None, started="2026-01-31T12:34:56Z"):
    recorded = {"started": started, "seconds": seconds, "machine": "2 CPUs (made)"}
    return StepExecution.read(step, recorded, run_id="f" * 32, page=page)


@pytest.mark.parametrize(
    ("entry", "name"),
    [("autoattack-standard", "AutoAttack"), ("pgd-20-ce", "PGD-20"), ("pgd-5-margin",
     "PGD-5-MARGIN"), ("apgd-ce", "APGD-CE"), ("fgsm", "FGSM"), ("MyAttack", "MyAttack")],
)  # fmt: skip
def test_attacks_have_the_names_of_papers(entry, name):
    assert attack_name(entry) == name


def test_a_list_names_its_ensemble_first_and_is_cut():
    assert attack_list_words(["fgsm", *["autoattack-standard"] * 4]) == "AutoAttack, FGSM"
    entries = ["fgsm", "pgd-20-ce", "square", "autoattack-standard"]
    assert attack_list_words(entries) == "AutoAttack and 3 more attacks"


@pytest.mark.parametrize("k", range(1, 256))
def test_whole_levels_are_written_as_such(k):
    assert pixels(k / 255) == f"{k}/255"


def test_confusions_count_every_item_once():
    rng = np.random.default_rng(7)
    labels, found = rng.integers(0, 4, (2, 200))
    counts = confusion(labels, found, num_classes=4)
    for row in range(4):
        for column in range(4):
            assert counts[row, column] == ((labels == row) & (found == column)).sum()


def test_by_class_figures_add_up_to_the_headline(page, finished, recipe, out):
    content = build_content(recipe, finished, out)
    (table,) = [t for t in content.tables() if t.name == "attack.linf.classes"]
    for model, clean, left in (("main", 37, 26), ("standard", 39, 3)):
        rows = [row for row in table.rows if row[0] == model]
        assert sum(row[2].num_correct for row in rows) == clean
        assert sum(row[3].num_correct for row in rows) == left
    assert {t.name for t in content.tables()} >= {
        f"attack.linf.confusion-{kind}-{i}" for kind in ("measured", "attacked") for i in (1, 2)
    }


def test_the_budget_curve_starts_at_clean_accuracy(finished, recipe, out):
    content = build_content(recipe, finished, out)
    (table,) = [t for t in content.tables() if t.name == "attack.linf.eps"]
    assert [row[0] for row in table.rows] == ["0", "2/255", "4/255", "8/255"]
    assert [cell.num_correct for cell in table.rows[0][1:]] == [37, 39]


def test_results_without_items_or_broken_images_are_still_reported(finished, recipe, out, tmp_path):
    folder = tmp_path / "attack.linf-0"
    folder.mkdir()
    for name in ("summary.json", "examples.npz"):
        (folder / name).write_bytes((finished["attack.linf"] / name).read_bytes())
    page = render(build_content(recipe, {**finished, "attack.linf": folder}, out))
    assert "broken items" in page
    assert "By class" not in page
    assert "eps 0 is their clean accuracy" not in page


def test_smoothed_clean_accuracy_and_wrong_certificates_are_told(page):
    assert "Clean, smoothed l2" in page
    assert "Clean, smoothed patch" in page
    assert 'class="strip card is-right"' in page


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (59.4, "59 s"), (185, "3 min 05 s"), (7620, "2 h 07 min")],
)
def test_durations(seconds, words):
    assert duration(seconds) == words


def test_steps_have_date_duration_machine_and_a_link(finished, recipe, out):
    steps = [ran("train.main", page="https://mlflow.example/#/runs/f"), ran("attack.linf")]
    shown = {fact.term: fact.value for fact in facts(steps)}
    assert shown == {
        "Date": "2026-01-31 12:34 UTC", "Duration": "3 min 00 s in 2 steps",
        "Hardware": "2 CPUs (made)",
    }  # fmt: skip
    table = steps_table(steps)
    assert table.rows[0][-1] == Link("f" * 32, "https://mlflow.example/#/runs/f")
    assert table.rows[1][-1] == "f" * 32
    assert facts([StepExecution.read("a", {}, run_id="", page=None)]) == ()


def test_only_addresses_of_servers_are_links():
    with pytest.raises(ValueError, match="not an address"):
        Link("run", "javascript:alert(1)")


def test_published_figures_stand_beside_ours(finished, recipe, out):
    path = load("ft-cifar10-trades-s12").source
    assert header(path)["Figures"] == "90.06 % clean, 56.14 % under AutoAttack."
    recipe.source = path
    assert "with other settings: not comparable" in render(build_content(recipe, finished, out))
    recipe.resolved = load(path).resolved
    page = render(build_content(recipe, finished, out))
    assert "<dt>Figures</dt><dd>90.06 % clean, 56.14 % under AutoAttack.</dd>" in page
    assert "not comparable" not in page
    recipe.source = f"{path} --smoke"
    assert "not comparable" in render(build_content(recipe, finished, out))
    assert header("a name") == header("/nowhere/a.yaml") == {}


def test_the_execution_of_a_step_is_read_from_its_manifest(finished, recipe, out, monkeypatch):
    manifest = SimpleNamespace(
        execution={"started": "2026-01-31T12:34:56Z", "seconds": 3.0, "machine": "1 CPU"},
        mlflow_run_id="a" * 32,
    )
    monkeypatch.setattr("pipelines.stages.report.stage.manifest_of", lambda folder: manifest)
    monkeypatch.setattr(out, "page_of_run", lambda run_id: f"http://server/#/runs/{run_id}")
    page = render(build_content(recipe, {"prepare": finished["prepare"]}, out))
    assert f'href="http://server/#/runs/{"a" * 32}"' in page
    assert "2026-01-31 12:34" in page
    monkeypatch.setattr(out, "page_of_run", lambda run_id: None)
    (out.place.storage.path / "mlflow.db").touch()
    page = render(build_content(recipe, {"prepare": finished["prepare"]}, out))
    (out.place.storage.path / "mlflow.db").unlink()
    assert "mlflow ui --backend-store-uri sqlite:///../../mlflow.db" in page
