"""The report stage over a made-up run: what the page says, and what it does with bad input."""

import csv
import html
import io
import json
import re
import shutil
from dataclasses import asdict
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest

from components.attacks.sanity.model import attention_alive
from components.core.errors import CasemateError
from components.data.prepared import PreparedDataset
from components.report.chapters import checks
from components.report.content import Check, Column, Content, Table
from components.report.page import render
from pipelines.stages.report import stage as report

CHAPTERS = {
    "tune": {"tuning"}, "train.main": {"training"}, "train.standard": {"training"},
    "attack.linf": {"attacks", "classes", "examples", "threats"},
    "certify.patch": {"patches", "threats", "verify"}, "certify.l2": {"radii", "threats", "verify"},
}  # fmt: skip
VOID = {"meta", "link", "br", "img", "wbr"}


class Outline(HTMLParser):
    """Checks that tags nest and collects anchors, ids, sections and sources."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open_tags: list[str] = []
        self.tags: set[str] = set()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.sources: list[str] = []
        self.feed(text)
        assert self.open_tags == []

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.tags.add(tag)
        self.ids += [found["id"]] if "id" in found else []
        self.links += [found["href"]] if tag in ("a", "link") else []
        self.sources += [found["src"]] if "src" in found else []
        if tag == "img":
            assert found["alt"]
        if tag == "svg":
            assert found["role"] == "img"
            assert found["aria-label"]
        if tag not in VOID:
            self.open_tags.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open_tags.pop()

    def handle_endtag(self, tag):
        assert self.open_tags.pop() == tag


@pytest.fixture
def write(recipe, out):
    """Run the stage and return the page's text."""

    def run(inputs, used=recipe):
        report.run(used, inputs, out)
        return (out.path / "report.html").read_text(encoding="utf-8")

    return run


def changed(finished, step, tmp_path, name, change):
    """The inputs with one JSON file of one step edited in a copy."""
    folder = shutil.copytree(finished[step], tmp_path / step)
    value = json.loads((folder / name).read_text())
    change(value)
    (folder / name).write_text(json.dumps(value))
    return {**finished, step: folder}


def test_page_is_one_well_formed_file_without_foreign_address(page):
    outline = Outline(page)
    assert len(set(outline.ids)) == len(outline.ids)
    assert {link[1:] for link in outline.links if link.startswith("#")} <= set(outline.ids)
    assert all(link.startswith(("#", "data:")) for link in outline.links)
    assert all(source.startswith("data:image/png;base64,") for source in outline.sources)
    assert len(re.findall("<script", page)) == 1  # our own, which the page's policy names
    assert not re.search(r"url\(\s*['\"]?https?:|@import", page)


def test_headline_numbers_are_those_of_the_files(write, finished, out):
    page = write(finished)
    rows = list(csv.DictReader(io.StringIO((out.path / "tables/headline.csv").read_text())))
    assert [row["Model"] for row in rows] == ["main", "standard"]
    assert float(rows[0]["Clean value"]) == 37 / 40
    assert float(rows[1]["After AutoAttack, FGSM (l∞, eps 8/255) value"]) == 3 / 40
    certificate = json.loads((finished["certify.patch"] / "certificate.json").read_text())
    at_two = certificate["summary"]["certified"][1]
    assert at_two["patch_size"] == 2
    column = "Certified patch (2 × 2 px) value"  # noqa: RUF001 - as on the page
    assert float(rows[0][column]) == at_two["accuracy"]["value"]
    assert rows[1][column] == ""
    assert "not run" in page
    assert f'<span class="figure-number">{1000 * at_two["accuracy"]["value"] // 1 / 10}%' in page


def test_equal_inputs_give_equal_bytes(page, write, finished):
    assert write(finished) == page


def test_the_page_names_no_place_of_this_machine(page, finished):
    assert str(finished["prepare"].parent) not in page
    assert "casemate verify certify.patch-0" in page


@pytest.mark.parametrize("kept", CHAPTERS)
def test_any_step_may_be_the_only_one(kept, write, finished):
    outline = Outline(write({k: finished[k] for k in ("prepare", kept)}))
    charts = {name for name in outline.ids if re.fullmatch(r"[mph][0-9a-f]{10}", name)}
    assert set(outline.ids) - charts == {"summary", "provenance"} | CHAPTERS[kept]


def test_prepare_alone_makes_a_page_and_without_it_there_is_none(write, finished):
    page = write({"prepare": finished["prepare"]})
    assert "No model was trained" in page
    assert "<svg" not in page
    with pytest.raises(CasemateError, match="prepare"):
        write({})


def test_a_certificate_without_challenge_says_so(write, finished, tmp_path):
    folder = shutil.copytree(finished["certify.l2"], tmp_path / "certify.l2")
    (folder / "challenge.json").unlink()
    page = write({**finished, "certify.l2": folder})
    assert "was not challenged" in page
    assert "radius 0.1" in page  # the smallest claimed radius takes the headline


def test_hostile_names_stay_text(write, finished, tmp_path):
    evil = "<script>alert(1)</script>"

    def rename(summary):
        summary["models"] = {evil: summary["models"]["main"]}

    inputs = changed(finished, "attack.linf", tmp_path, "summary.json", rename)
    examples = inputs["attack.linf"] / "examples.npz"
    _rename_model(examples, old="main", new=evil)
    hostile = SimpleNamespace(
        name=evil, source=evil, seed=7, resolved=lambda: {"name": evil},
        report=SimpleNamespace(title=f'"{evil}&', num_examples=1, compare={}),
    )  # fmt: skip
    page = write(inputs, hostile)
    assert len(re.findall("<script", page)) == 1
    assert html.escape(evil) in page


def _rename_model(path, *, old, new):
    with np.load(path) as arrays:
        kept = {k.replace(f"{old}/", f"{new}/", 1): arrays[k] for k in arrays if k.startswith(old)}
    np.savez(path, **kept)


@pytest.mark.parametrize(
    ("step", "name", "change"),
    [
        ("certify.patch", "challenge.json", lambda v: v.update(broken_certified=1)),
        ("certify.patch", "certificate.json", lambda v: v.update(sound=False)),
        ("certify.l2", "certificate.json",
         lambda v: v["evidence"].update(model_digest="0" * 64)),
        ("certify.l2", "certificate.json",
         lambda v: v["evidence"].update(dataset_digest="0" * 64)),
        ("certify.l2", "certificate.json",
         lambda v: v["summary"]["certified"][0]["accuracy"].update(value=0.9, high=0.99)),
        ("attack.linf", "summary.json",
         lambda v: v["models"]["main"].update(
             robust_accuracy={"value": 1.0, "low": 0.9, "high": 1.0, "num_items": 40})),
        ("attack.linf", "summary.json",
         lambda v: v["models"]["main"]["attacks"][0].update(
             robust_accuracy={"value": 0.5, "low": 0.3, "high": 0.7, "num_items": 40})),
    ],
)  # fmt: skip
def test_contradictions_fail_exactly_one_check(step, name, change, finished, tmp_path):
    inputs = changed(finished, step, tmp_path, name, change)
    dataset = PreparedDataset.open(finished["prepare"])
    assert all(check.holds for check in checks(report.read_results(dataset, finished)))
    failed = [c for c in checks(report.read_results(dataset, inputs)) if not c.holds]
    assert [check.text.split(":")[0] for check in failed] == [step]


def test_a_failed_check_raises_the_alarm_on_the_page(page):
    table = Table("headline", (Column("Model"),), (("main",),))
    alarmed = render(Content("t", "s", (), table, (Check(True, "a"), Check(False, "b")), (), ""))
    assert "1 of 2 consistency checks" in alarmed
    assert alarmed.count('<li class="failed">') == 1
    assert 'role="alert"' not in page


def test_vanished_gradients_are_told_beside_the_chart(page, write, finished, tmp_path):
    def vanish(summary):
        summary["models"]["standard"]["zero_gradient_rate"] = 0.125

    inputs = changed(finished, "attack.linf", tmp_path, "summary.json", vanish)
    told = "12.50% of the gradients of standard were exactly zero"
    assert told in write({k: inputs[k] for k in ("prepare", "attack.linf")})
    assert "exactly zero:" not in page


def test_verdicts_are_badges_with_their_reasons(page):
    badges = re.findall(r'<li class="(\w+)"><span class="badge">(\w+)</span> <b>(.*?)</b>', page)
    assert badges == [
        ("reliable", "reliable", "attack.linf, main"),
        ("suspect", "suspect", "attack.linf, standard"),
    ]
    assert page.count("<li>square (attack list): square broke 4 of 40</li>") == 1


def test_checks_that_were_not_run_do_not_count_as_passed(write, finished, tmp_path, out):
    def without_attention(summary):
        missing = attention_alive({}, why_none="model.architecture: ResNet has none")
        summary["models"]["main"]["sanity"]["findings"] += map(asdict, missing)

    inputs = changed(finished, "attack.linf", tmp_path, "summary.json", without_attention)
    page = write({key: inputs[key] for key in ("prepare", "attack.linf")})
    assert "<b>attack.linf, main</b>: 2 of 2 sanity checks pass, 2 not checked" in page
    assert "3 of 4 checks pass, 2 not checked" in page  # of both models; one fails
    table = (out.path / "tables/attack.linf.sanity.csv").read_text()
    rows = list(csv.DictReader(io.StringIO(table)))
    results = [row["Result"] for row in rows]
    assert results == ["FAILS", "not checked", "not checked", "holds", "holds", "holds"]
    assert rows[1]["found"] == rows[1]["limit"] == ""


def test_the_attack_list_is_a_table_of_what_each_attack_left(write, finished, out):
    write(finished)
    table = (out.path / "tables/attack.linf.list.csv").read_text()
    rows = [row for row in csv.DictReader(io.StringIO(table)) if row["Model"] == "main"]
    assert [row["Attack"] for row in rows] == [
        "none", "fgsm", "autoattack-standard: apgd-ce", "autoattack-standard: square",
    ]  # fmt: skip
    left = [float(row["left (by it and all before) value"]) for row in rows]
    assert left == [37 / 40, 31 / 40, 28 / 40, 26 / 40]
    assert [row["broken"] for row in rows] == ["", "6", "3", "2"]


def test_scaled_networks_stand_apart_from_robust_accuracy(write, finished, out):
    page = write(finished)
    table = (out.path / "tables/attack.linf.paper_protocol.csv").read_text()
    header = table.splitlines()[0]
    assert header.count("paper protocol") == 8  # two shares of four columns
    assert "which are other classifiers" in page
    assert "paper protocol" not in (out.path / "tables/headline.csv").read_text()


def test_best_trial_is_marked_and_a_failed_one_never_is(page):
    row = re.search(r'<tr class="marked">(.*?)</tr>', page, re.DOTALL)
    assert row is not None
    assert re.search(r">\s*1 <span class=\"mark\">best", row[1])
    assert "55.00%" in row[1]
    assert "0.003" in row[1]


@pytest.mark.parametrize(
    ("step", "name"),
    [("train.main", "history.json"), ("attack.linf", "summary.json"), ("tune", "trials.json"),
     ("attack.linf", "examples.npz"), ("certify.l2", "certificate.json"),
     ("certify.l2", "certificates.parquet"), ("certify.patch", "votes.parquet")],
)  # fmt: skip
def test_missing_or_cut_files_are_named(step, name, write, finished, tmp_path):
    folder = shutil.copytree(finished[step], tmp_path / step)
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(CasemateError, match=re.escape(name)):
        write({**finished, step: folder})
    (folder / name).unlink()
    with pytest.raises(CasemateError, match=re.escape(name)):
        write({**finished, step: folder})
