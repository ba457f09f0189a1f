"""The miniature replication of analyses: its figures, from numbers made up here."""

from itertools import product

import pytest

from components.core.errors import CasemateError
from components.evaluate.metrics import Measurement, Subject, rows_of
from notebooks.replications import analysis, runs
from notebooks.replications import analysis_measures as measures
from notebooks.replications.evaluation_findings import DIGITS, PHOTOS
from tests.e2e.cli import ROOT

pytestmark = pytest.mark.e2e
RESULTS = ROOT / "notebooks" / "results"


def line(seed, data, model):
    """A ViT of four blocks: the first one counts, attention counts more than MLPs."""
    found = {"seed": seed, "data": data, "model": model}
    if model != measures.NOISE:
        found |= {"params_m": 0.2, "clean": 0.6}
    if model in measures.VITS[data]:
        found["lesions"] = {
            "whole": 0.6,
            "block": {"single": [0.1, 0.4, 0.3, 0.5], "several": [0.25, 0.15]},
            "attn": {"single": [0.1, 0.4, 0.4, 0.4], "several": [0.3 + seed / 100, 0.2]},
            "mlp": {"single": [0.2, 0.5, 0.5, 0.5], "several": [0.4, 0.35]},
        }
        found["correlation"] = {"all": [0.5, 0.6, 0.7], "cls": [0.9, 0.5, 0.4 + seed / 100]}
        found["attention"] = {
            "spatial": [0.3, 0.4, 0.5, 0.6],
            "random": [0.1, 0.1, 0.2, 0.6],
            "cls_first": [0.6, 0.4, 0.3, 0.2, 0.1],
            "cls_last": [0.6, 0.6, 0.5, 0.3, 0.1],
        }
    if model in (*measures.GENERATORS, measures.NOISE):
        robust = 0.2 if model.endswith("robust") else 0.0
        found["perturbations"] = {
            "alignment": 1.5 if "resnet" not in model else 1.0 + seed / 100,
            **{f"{judge}/plus": 0.1 + robust for judge in measures.JUDGES},
            "vit-coarse/minus": 0.1, "resnet-narrow/minus": 0.1 + 2 * robust,
        }  # fmt: skip
    return found


@pytest.fixture(scope="module")
def lines():
    return [line(*where) for where in product((2, 0, 1), (DIGITS, PHOTOS), measures.NAMES)]


@pytest.mark.parametrize("data", [DIGITS, PHOTOS])
def test_differences_are_those_of_the_numbers(lines, data):
    found = analysis.experiments_of(measures.Lines(lines, data))
    first, parts, later, token, near, only, meaning, borders = ([*e.contrasts] for e in found)
    assert first[0].difference.values == pytest.approx((-20, -20, -20))  # 0.1 minus 0.3
    assert first[-1].difference.values == pytest.approx((-20, -20, -20))  # 0.4 minus 0.6
    assert first[-1].verdict == "a difference"
    assert parts[0].difference.values == pytest.approx((-10, -9, -8))
    assert [c.difference.mean for c in parts[3:]] == pytest.approx([-15, -10, -6])
    assert later[0].difference.values == pytest.approx((20, 20, 20))
    assert token[0].difference.values == pytest.approx((-50, -49, -48))
    assert token[3].difference.values == pytest.approx((-30, -29, -28))
    assert near[0].difference.values == pytest.approx((30, 30, 30))  # 0.45 minus 0.15
    assert near[-2].difference.values == pytest.approx((30, 30, 30))  # distance 1
    assert [only[0].difference.mean, only[3].difference.mean] == pytest.approx([20, 10])
    assert [c.difference.mean for c in meaning] == pytest.approx(2 * [20, 20, 0, 0, 0])
    assert borders[0].difference.values == pytest.approx((50, 49, 48))
    assert {c[0].verdict for c in (first, parts, later, token, near, only, meaning, borders)} == {
        "reproduced"
    }


def test_the_first_comparison_is_on_the_more_accurate_vit(lines):
    digits, photos = (measures.Lines(lines, data).vits[0] for data in (DIGITS, PHOTOS))
    assert (digits, photos) == ("vit-coarse", "main")
    stored = runs.read(RESULTS / "analysis.jsonl")
    for data, best in ((DIGITS, digits), (PHOTOS, photos)):
        known = measures.Lines(stored, data)
        accuracies = {m: known.estimate(m, measures.clean).mean for m in known.vits}
        assert max(accuracies, key=accuracies.get) == best


def test_the_page_does_not_depend_on_the_order_of_lines(lines):
    text = analysis.render(lines)
    assert "Every ViT has\n**4 blocks**" in text
    assert "- First block, photographs: **reproduced**" in text
    assert text == analysis.render(lines[::-1])
    assert analysis.page.svg(analysis.draw(lines)).count("<svg") == 1


def test_judges_are_standard_models_that_generate_no_perturbation():
    _, change = measures.STUDIES[DIGITS]["perturbations"]
    section = analysis.recipe_of(1, DIGITS, [change]).analyze
    assert section.perturbations.judge_models == measures.JUDGES
    assert not {*section.models} & {*measures.JUDGES}
    assert not any(name.endswith("robust") for name in measures.JUDGES)


def test_levels_are_read_in_their_order():
    subject = Subject(model="m", model_digest="d", dataset="s", dataset_digest="e", seed=0)
    numbers = [
        Measurement(item="spatial", metric="accuracy", value=level / 100, level=level)
        for level in (10, 2, 0)
    ]
    rows = rows_of(subject, "restricted_attention", numbers)
    assert analysis._levels(rows, "restricted_attention", "spatial", "accuracy") == [0, 0.02, 0.1]


def test_runs_that_are_not_finished_are_named(tmp_path):
    with pytest.raises(CasemateError, match=r"evaluate\.clean-\w+ is not finished; add --run"):
        analysis.collect(tmp_path, 0)


def test_the_stored_page_is_that_of_the_stored_numbers():
    lines = runs.read(RESULTS / "analysis.jsonl")
    assert len(lines) == 3 * 2 * len(measures.NAMES)
    assert analysis.render(lines) == (RESULTS / "analysis.md").read_text()


def test_networks_without_a_restriction_are_whole():
    """A mask of all pairs hides nothing; the last block's patches do not reach the head."""
    for one in runs.read(RESULTS / "analysis.jsonl"):
        if "attention" in one:
            whole, attention = one["lesions"]["whole"], one["attention"]
            unrestricted = [attention[kind][-1] for kind in ("spatial", "random")]
            unrestricted += [attention["cls_first"][0], *attention["cls_last"][:2]]
            assert unrestricted == pytest.approx([whole] * 5, abs=0.002)  # one item of 500
            assert attention["cls_first"][-1] == attention["cls_last"][-1]
