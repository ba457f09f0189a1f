"""The table of published results: complete, of recipes that exist, with reasons for gaps."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from components.core.errors import CasemateError
from pipelines import api
from pipelines.flow.plan import plan
from pipelines.recipe import published as subject
from pipelines.recipe.load import RECIPES, available, find, headline, load
from pipelines.recipe.published import (
    CATALOGUE,
    Item,
    beyond,
    is_miniature,
    paper_line,
    papers,
    references,
)
from pipelines.runtime.artifacts import StageDir
from pipelines.runtime.step_locks import hold
from pipelines.runtime.storage import Storage

# Tables and figures of each paper, counted in its text; 2209.07399 in the thesis version.
NUMBERS = {
    "attention-scaling": (5, 5),
    "denoised-smoothing": (7, 5),
    "robust-xcit": (9, 14),
    "smoothed-vit": (8, 15),
    "understanding-vit": (5, 34),
}
EVERY = {
    Item(paper, kind, number)
    for paper, counts in NUMBERS.items()
    for kind, count in zip(("table", "figure"), counts, strict=True)
    for number in range(1, count + 1)
}
ENTRIES = subject.published()


def test_every_table_and_figure_occurs_once():
    items = [entry.item for entry in ENTRIES]
    assert sorted(items) == sorted(EVERY)
    assert set(papers()) == {p.parent.name for p in RECIPES.rglob("*.yaml")} - {"recipes"}


def test_every_recipe_occurs():
    listed = {name for e in ENTRIES for name in (*e.recipes, *e.miniatures)}
    rest = {name for paper in (*papers(), None) for name in beyond(paper)}
    assert listed | rest == set(available())
    assert not listed & rest


@pytest.mark.parametrize("name", [name for name in available() if name != "demo"])
def test_heads_name_what_exists(name):
    assert references(name) <= EVERY
    said = re.findall(r"\b(?:Table|Figure)s? \d", paper_line(name))
    assert bool(said) == bool(references(name))


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: f"{e.item.paper}-{e.item}")
def test_each_entry_has_recipes_or_says_why_not(entry):
    assert bool(entry.recipes) != bool(entry.missing)
    assert not (entry.missing and entry.partly)
    assert len(entry.title) > 10
    if entry.same_as:
        assert any(entry.same_as in references(name) for name in entry.recipes)


def test_notes_name_recipes_and_commands_that_exist():
    text = CATALOGUE.read_text(encoding="utf-8")
    known = available()
    for word in re.findall(r"\b(?:aas|dds|ft|in1k|in100|mo|svit|uvit)-[a-z0-9*-]+", text):
        assert any(Path(name).match(word) for name in known), word
    for command in re.findall(r"casemate ([a-z-]+)", text):
        assert command in ("recipes", "models", "estimate", "import-weights", "scaling")
    root = RECIPES.parents[1]
    assert all((root / path).is_file() for path in re.findall(r"tests/[\w/]+\.py", text))


@pytest.mark.parametrize(
    ("line", "items"),
    [
        ("X, Tables 1, 2 and 3", {("table", 1), ("table", 2), ("table", 3)}),
        ("X, Table 6d", {("table", 6)}),
        ("X, Table 4, row 0.5", {("table", 4)}),
        (
            "arXiv:2110.07719, Figures 4, 5 and 12, Table 8, section 4.1",
            {
                *(("figure", 4), ("figure", 5), ("figure", 12), ("table", 8)),
            },
        ),
        (
            "sec. 4.3, Figures 11 to 13, Table 9",
            {
                *(("figure", 11), ("figure", 12), ("figure", 13), ("table", 9)),
            },
        ),
        ("X, and the thesis version; the released checkpoint", set()),
    ],
)
def test_heads_are_read(monkeypatch, line, items):
    monkeypatch.setattr(subject, "paper_line", lambda name: line)
    found = subject.references("svit-in1k-col19-r18")
    assert {(item.kind, item.number) for item in found} == items


def test_heads_of_several_lines_are_read_whole():
    assert paper_line("in1k-eps4-pictures").endswith("Figures 11 to 14, Table 9")


def test_miniatures_do_not_cover(monkeypatch):
    small = {name for name in available() if is_miniature(name)}
    assert small == {name for name in available() if name.endswith("-mini")}
    assert not any(set(entry.recipes) & small for entry in ENTRIES)


def test_a_new_table_without_recipe_or_reason_is_found(tmp_path, monkeypatch):
    text = CATALOGUE.read_text(encoding="utf-8")
    file = tmp_path / "published.toml"
    file.write_text(
        text.replace("[smoothed-vit.table]", '[smoothed-vit.table]\n99 = {title = "T"}')
    )
    monkeypatch.setattr(subject, "CATALOGUE", file)
    (new,) = (e for e in subject.published() if e.item.number == 99)
    assert not new.recipes
    assert not new.missing


# -- rows with cost and status


def test_rows_tell_what_is_needed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = api.published(paper="smoothed-vit", costs=False)
    about = {a["recipe"]: a for row in rows for a in row["recipes"]}
    assert about["svit-cifar-col4-r18"]["status"] == "needs data: data/cifar10"
    assert about["svit-cifar-col4-r18"]["downloads"]
    assert about["svit-mnist5k-mini"]["status"] == "ready"
    (tmp_path / "data" / "cifar10").mkdir(parents=True)
    rows = api.published(paper="smoothed-vit", costs=False)
    about = {a["recipe"]: a for row in rows for a in row["recipes"]}
    assert about["svit-cifar-col4-r18"]["status"] == "ready"
    assert {row["item"] for row in rows if row["status"] == "covered"} >= {"Table 1", "Table 6"}
    assert {row["item"] for row in rows if row["status"] == "not covered"} >= {"Table 3"}


def test_costs_are_those_of_the_estimate():
    rows = api.published(paper="denoised-smoothing")
    about = {a["recipe"]: a for row in rows for a in row["recipes"]}
    parts = api.estimate("certify-100k", accelerators=["A100"])
    cost = about["certify-100k"]["cost"]
    assert cost["hours_high"] == pytest.approx(sum(p["hours"][0]["high"] for p in parts))
    assert cost["not_estimated"] == []
    assert about["dds-denoiser"]["cost"]["hours_high"] > 0  # a training alone
    assert "denoiser" in about["dds-ft-vit"]["cost"]["why"]
    assert headline("certify-100k") == about["certify-100k"]["what"]
    assert find("certify-100k").is_file()


def test_unknown_papers_are_refused():
    with pytest.raises(CasemateError, match="smoothed-vit"):
        api.published(paper="vits", costs=False)


def finished_report(recipe, root, fingerprint):
    """A finished report, as the end of a flow leaves it."""
    place = Storage.at(root).step(recipe, f"report-{fingerprint[:12]}")
    place.work.mkdir(parents=True)
    run = SimpleNamespace(run_id="mlflow-1")
    with hold(place.store, [place.key]):
        stage = StageDir(place.work, "report", fingerprint, run, {}, place)
        stage.write_bytes("report.html", b"<html>")
        stage.finish()


def test_finished_flows_are_found_and_told_from_other_settings(tmp_path):
    (report,) = (s for s in plan(load("demo"), tmp_path) if s.step.stage == "report")
    finished_report("demo", tmp_path, report.fingerprint)
    (smoke,) = (
        s for s in plan(load("certify-100k", smoke=True), tmp_path) if s.step.stage == "report"
    )
    finished_report("certify-100k", tmp_path, smoke.fingerprint)
    rows = api.published(storage=tmp_path, costs=False)
    about = {a["recipe"]: a["status"] for row in rows for a in row["recipes"]}
    assert about["demo"] == f"run: results in {tmp_path}"
    assert about["certify-100k"] == f"run with other settings: results in {tmp_path}"
    assert about["dds-mnist5k-mini"] == "ready"
