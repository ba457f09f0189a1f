"""The notebooks for newcomers, executed: one on a real finished run, two on their own networks."""

import json
import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook
from scipy.stats import binomtest

from tests.e2e.cli import ROOT

pytestmark = pytest.mark.e2e
NOTEBOOK = ROOT / "notebooks" / "quickstart.ipynb"
OWN_MODEL = ROOT / "notebooks" / "attack-and-certify-my-model.ipynb"
COMPARE = ROOT / "notebooks" / "compare-runs.ipynb"
INSIDE = ROOT / "notebooks" / "inside-a-vit.ipynb"
HALF_DIGIT = 0.5e-6  # the table prints six decimals


@pytest.fixture(scope="module")
def executed(finished_flow):
    """Executes a notebook: `executed(path, cell="before -> after")` gives its code cells by id.

    All share one kernel, whose imports take seconds, but no variables. An error is raised here.
    """
    place = {"metadata": {"path": str(NOTEBOOK.parent)}}
    client = NotebookClient(new_notebook(), timeout=180, kernel_name="python3", resources=place)
    env = {**os.environ, "CASEMATE_STORAGE": str(finished_flow)}
    env.pop("MLFLOW_TRACKING_URI", None)

    def run(path: Path, **changes: str) -> dict:
        client.nb = nbformat.read(path, as_version=4)
        cells = {cell["id"]: cell for cell in client.nb.cells if cell["cell_type"] == "code"}
        for name, change in changes.items():
            before, after = change.split(" -> ")
            assert before in cells[name]["source"]
            cells[name]["source"] = cells[name]["source"].replace(before, after)
        client.nb.cells.insert(0, new_code_cell("%reset -f"))
        client.execute(env=env, cleanup_kc=False)
        return cells

    yield run
    client.nb = new_notebook()
    client.execute(cleanup_kc=True)


@pytest.fixture(scope="module")
def cells(executed):
    return executed(NOTEBOOK)


def text_of(cell) -> str:
    """What a cell printed and displayed, as plain text."""
    printed = [o["text"] for o in cell["outputs"] if o.get("name") == "stdout"]
    shown = [o["data"]["text/plain"] for o in cell["outputs"] if "data" in o]
    return "\n".join(printed + shown)


def documents(storage: Path) -> dict[str, dict]:
    """certificate.json of every certify step."""
    found = storage.glob("*/certify.*/certificate.json")
    return {p.parent.name.split("-")[0]: json.loads(p.read_text()) for p in found}


def test_every_cell_ran_without_error(cells):
    kinds = {o["output_type"] for cell in cells.values() for o in cell["outputs"]}
    assert all(cell["execution_count"] for cell in cells.values())
    assert "error" not in kinds


def test_certified_accuracies_are_those_of_the_certificates(cells, finished_flow):
    header, *rows = text_of(cells["certified-accuracy"]).strip().splitlines()
    columns = header.split()
    shown = [dict(zip(columns, row.split(), strict=True)) for row in rows]
    expected = [
        {"step": step, "at": entry.get("radius", entry.get("patch_size")), **entry["accuracy"]}
        for step, document in sorted(documents(finished_flow).items())
        for entry in document["summary"]["certified"]
    ]
    assert len(expected) == 8
    assert [row["step"] for row in shown] == [row["step"] for row in expected]
    for row, want in zip(shown, expected, strict=True):
        num_items = want["num_items"]
        ends = binomtest(round(want["value"] * num_items), num_items).proportion_ci(method="wilson")
        want |= {"low": ends.low, "high": ends.high}  # files have the exact interval
        for column in ("at", "value", "low", "high", "num_items"):
            assert float(row[column]) == pytest.approx(want[column], rel=0, abs=HALF_DIGIT)


def test_every_certificate_is_derived_again_and_verified(cells, finished_flow):
    text = text_of(cells["recertify"])
    for step, document in documents(finished_flow).items():
        verdict = f"{step}: {document['summary']['num_items']} items verified, every claim holds"
        assert text.count(verdict) == 2  # the stored certificate and the derived one
    assert "'failure_prob': 0.01" in text


@pytest.mark.parametrize("cell", ["curves", "model"])
def test_pictures_are_drawn(cells, cell):
    assert any("image/png" in output.get("data", {}) for output in cells[cell]["outputs"])


def test_steps_and_runs_are_listed(cells):
    steps, runs = text_of(cells["steps"]), text_of(cells["mlflow"])
    for step in (
        "prepare",
        "train.main",
        "train.columns",
        "attack.linf",
        "evaluate.clean",
        "certify.early",
    ):
        assert step in steps
        assert step in runs
    assert runs.count("FINISHED") == 12  # the flow and its eleven steps


def test_a_vit_is_taken_apart(executed):
    cells = executed(INSIDE, train="num_steps, eps = 600 -> num_steps, eps = 30")
    pictures = ("correlation", "lesions", "masks", "restricted", "perturbations", "accumulation")
    for name in pictures:
        assert any("image/png" in output.get("data", {}) for output in cells[name]["outputs"])
    table = text_of(cells["lesions"]).splitlines()
    assert table[0].startswith("whole network: ")
    assert [line.split()[0] for line in table[-6:]] == [f"{block}.0" for block in range(6)]
    last = text_of(cells["restricted"]).splitlines()[-1].split()
    assert last[1] == last[2]  # no attention between patches in the first or the last 6 of 6 blocks


def test_a_network_of_ones_own_is_attacked_and_certified(executed):
    cells = executed(OWN_MODEL, model="1520 -> 1506")  # 6 items
    assert "robust" in text_of(cells["attack"])
    assert "gaussian_noise" in text_of(cells["evaluate"])
    for name in ("patch", "l2"):
        assert "num_items" in text_of(cells[name])


def test_runs_are_compared_item_by_item(executed):
    cells = executed(
        COMPARE, certify="num_estimate=1000, radii=radii -> num_estimate=400, radii=radii"
    )
    table = text_of(cells["compare"])
    assert "smoothed.l2" in table
    assert "certified.l2@0.3" in table
    assert "items" in text_of(cells["refused"])
    assert any("image/png" in output.get("data", {}) for output in cells["curves"]["outputs"])
