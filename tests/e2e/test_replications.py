"""The miniature replications: the notebook runs, the page is that of its trials, intervals hold."""

import json
import os
from dataclasses import replace

import nbformat
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nbclient import NotebookClient
from scipy import stats

from notebooks.replications import page, trials
from notebooks.replications.arms import ARMS, SIZES
from notebooks.replications.experiments import EXPERIMENTS
from notebooks.replications.statistics import Estimate, paired, verdict
from tests.e2e.cli import ROOT

pytestmark = pytest.mark.e2e
NOTEBOOK = ROOT / "notebooks" / "replications.ipynb"
RESULTS = ROOT / "notebooks" / "results"
SMALL = SIZES["small"]
accuracies = st.floats(0, 100)
pairs = st.lists(st.tuples(accuracies, accuracies), min_size=2, max_size=6)


@pytest.fixture(scope="module")
def stored():
    """The committed trials, by arm; one whose settings are not those of today is missing."""
    found = trials.read(RESULTS / "training.jsonl")
    size = SIZES["full"]
    keys = {arm: trials.digest_of(arm, size) for arm in ARMS}
    return {arm: [found[arm, seed, key] for seed in size.seeds] for arm, key in keys.items()}


def test_the_notebook_runs_at_its_smallest_size():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    folder = {"metadata": {"path": str(NOTEBOOK.parent)}}
    client = NotebookClient(notebook, timeout=180, kernel_name="python3", resources=folder)
    client.execute(env={**os.environ, "CASEMATE_SIZE": "small"})
    cells = {cell["id"]: cell for cell in notebook.cells if cell["cell_type"] == "code"}
    assert all(cell["execution_count"] for cell in cells.values())
    text = cells["trials"]["outputs"][-1]["text"]
    assert f"{2 * len(ARMS)} trials of {len(ARMS)} arms" in text
    for figure in ("differences", "arms"):
        shown = [o["data"] for o in cells[figure]["outputs"] if "data" in o]
        assert any("image/svg+xml" in data for data in shown)


def test_the_page_is_the_one_of_its_trials(stored):
    assert page.render(stored, SIZES["full"]) == (RESULTS / "training.md").read_text()


def test_every_finding_has_three_seeds(stored):
    for make in EXPERIMENTS:
        for contrast in make(stored).contrasts:
            assert len(contrast.difference.values) == 3


def test_what_is_certified_was_voted_rightly_and_shrinks_with_the_patch(stored):
    for arm in ("vit, tokens dropped", "vit, tokens masked", "resnet"):
        for trial in stored[arm]:
            _, vote, *certified = (right for right, _ in trial["counts"].values())
            assert [vote, *certified] == sorted([vote, *certified], reverse=True)


def test_no_attack_looks_weaker_than_what_it_contains(stored):
    for arm in ("pgd", "pgd + aas"):
        for trial in stored[arm]:
            count = {key: value[0] for key, value in trial["counts"].items()}
            assert count["clean"] >= count["pgd"]
            assert count["pgd"] >= max(count["pgd + restarts"], count["pgd + aas"])


def test_a_trial_is_a_function_of_its_settings_and_is_kept(tmp_path, monkeypatch):
    size = replace(SMALL, seeds=(0,))
    lines = [trials.run_all(tmp_path / name, size, arms=["fgsm"])["fgsm"][0] for name in ("a", "b")]
    first, second = ({k: v for k, v in line.items() if k != "seconds"} for line in lines)
    assert first == second
    monkeypatch.setattr(trials, "make_session", None)  # nothing can be trained from here on
    assert trials.run_all(tmp_path / "a", size, arms=["fgsm"])["fgsm"] == [lines[0]]
    with pytest.raises(TypeError):  # other settings are another trial
        trials.run_all(tmp_path / "a", replace(size, apgd_steps=4), arms=["fgsm"])


def test_tidying_keeps_the_trials_of_today_only(tmp_path):
    path = tmp_path / "trials"
    old, new = ({"arm": "fgsm", "seed": 0, "settings": s, "counts": {}} for s in ("old", "new"))
    path.write_text(json.dumps(old) + "\n" + json.dumps(new) + "\n")
    trials.tidy(path, {"fgsm": [new]})
    assert trials.read(path) == {("fgsm", 0, "new"): new}


@settings(max_examples=30)
@given(pairs)
def test_paired_intervals_are_those_of_scipy(values):
    first, second = zip(*values, strict=True)
    differences = {round(a - b, 6) for a, b in values}
    if len(differences) == 1:  # scipy divides by the spread
        return
    expected = stats.ttest_rel(first, second).confidence_interval(0.95)
    assert paired(first, second).interval == pytest.approx(tuple(expected), abs=1e-6)


@pytest.mark.parametrize(
    ("values", "expected", "word"),
    [
        ((1.0, 1.1, 1.2), +1, "reproduced"),
        ((1.0, 1.1, 1.2), -1, "the opposite"),
        ((-1.0, -1.1, -1.2), -1, "reproduced"),
        ((0.1, 1.0, 2.0), +1, "not decided"),  # all above 0, and yet three are too few
        ((0.1, 1.0, 2.0), 0, "no difference seen"),
        ((1.0, 1.1, 1.2), 0, "a difference"),
    ],
)
def test_verdicts(values, expected, word):
    assert verdict(Estimate(values), expected=expected) == word


def test_one_seed_has_no_interval():
    with pytest.raises(ValueError, match="at least two"):
        Estimate((1.0,))
