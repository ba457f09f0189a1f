"""The miniature replication of evaluations: its figures, from numbers made up here."""

from itertools import product

import pytest

from components.core.errors import CasemateError
from notebooks.replications import evaluation, runs
from notebooks.replications.evaluation_findings import DIGITS, MODELS, PHOTOS, Lines
from tests.e2e.cli import ROOT

pytestmark = pytest.mark.e2e
RESULTS = ROOT / "notebooks" / "results"


def line(seed, data, model):
    """ViTs lose 10 points to corruptions, ResNets 20; PGD transfers within a family only."""
    lost = 0.2 if "resnet" in model else 0.1
    robust = 0.15 if "robust" in model else 0.0
    found = {"clean": 0.8, "mean75": 0.7, "mean95": 0.8 - lost, "clean, transfer": 0.8}
    found |= {"noise": 0.5 + robust, "blur": 0.5, "weather": 0.5, "digital": 0.5}
    found |= {"fog and contrast": 0.5 - robust + seed / 100}
    for kind, source in product(("fgsm", "pgd"), MODELS):
        same = ("resnet" in source) == ("resnet" in model)
        found[f"{kind} of {source}"] = 0.3 if source == model else 0.6 if same else 0.75
    found |= {f"{kind}, own": 0.4 - lost for kind in ("fgsm", "pgd")}
    found |= {"clean, spatial": 0.8, "spatial": 0.3 if model == "vit-coarse" else 0.5}
    return {"seed": seed, "data": data, "model": model, "accuracy": found}


@pytest.fixture(scope="module")
def lines():
    return [line(*where) for where in product((2, 0, 1), (DIGITS, PHOTOS), MODELS)]


@pytest.mark.parametrize("data", [DIGITS, PHOTOS])
def test_differences_are_those_of_the_numbers(lines, data):
    found = evaluation.experiments_of(Lines(lines, data))
    corruptions, training, own, transfer, spatial = ([*e.contrasts] for e in found)
    assert [c.difference.mean for c in corruptions] == pytest.approx([10, -10, -12.5, 0])
    assert [c.verdict for c in corruptions[:3]] == 3 * ["reproduced"]
    assert [c.difference.mean for c in training] == pytest.approx([15, -15, 15, -15])
    assert [c.difference.mean for c in own] == pytest.approx([10, 10])
    assert [c.difference.mean for c in transfer] == pytest.approx([-15, -15, 0])
    assert [c.difference.mean for c in spatial] == pytest.approx([0, 20, 0, 25])


def test_the_page_does_not_depend_on_the_order_of_lines(lines):
    text = evaluation.render(lines)
    assert "- Corruptions, photographs: **reproduced**" in text
    assert text == evaluation.render(lines[::-1])
    assert evaluation.page.svg(evaluation.draw(lines)).count("<svg") == 1


def test_runs_that_are_not_finished_are_named(tmp_path, monkeypatch):
    with pytest.raises(CasemateError, match=r"evaluate\.clean-\w+ is not finished; add --run"):
        evaluation.collect(tmp_path, 0)
    monkeypatch.delenv(evaluation.PHOTOS_ENV, raising=False)
    with pytest.raises(CasemateError, match="CASEMATE_PHOTOS: is not set: name an npz file"):
        evaluation.recipe_of(0, PHOTOS)


def test_the_stored_page_is_that_of_the_stored_numbers():
    lines = runs.read(RESULTS / "evaluation.jsonl")
    assert len(lines) == 3 * 2 * len(MODELS)
    assert evaluation.render(lines) == (RESULTS / "evaluation.md").read_text()
