"""From a folder of images to a finished flow: `casemate init`, then the recipe it wrote."""

import json
import re
from pathlib import Path

import pytest

from pipelines import api
from tests import image_folders as folders
from tests.e2e.cli import call, mistake_of, step_folder

pytestmark = pytest.mark.e2e


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """The recipe for unequal sizes, a class of one image, an unreadable one: told, no obstacle."""
    monkeypatch.chdir(tmp_path)
    root = folders.mixed_sizes(tmp_path / "my images")
    folders.save(root / "rare" / "one.png", folders.pixels(2, 0, 48, 40, channels=1))
    (root / "cat" / "zz.jpg").write_bytes(b"broken")
    told = call("init", "--task", "certify", "--data", root)
    assert told.code == 0, told.err
    assert "1 class has 1 image: rare" in told.out
    assert "cannot be read" in told.out
    return tmp_path / "certify-my-images.yaml"


@pytest.mark.usefixtures("ray_session")
def test_a_folder_becomes_a_recipe_whose_images_are_prepared(recipe):
    assert f"{recipe.name}: valid, 0 warning(s)" in call("lint", recipe.name).out
    made = call("prepare", recipe.name, "--smoke", "--storage", "runs")
    assert made.code == 0, made.err
    described = json.loads((step_folder(Path("runs"), "prepare") / "dataset.json").read_text())
    assert described["classes"] == ["cat", "dog", "rare"]
    assert len(described["skipped"]) <= 1


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_session")
def test_a_folder_becomes_a_recipe_that_runs(recipe):
    run = call("run", recipe.name, "--smoke", "--storage", "runs", "--json")
    assert run.code == 0, run.err
    assert {row["what"].split()[0] for row in run.json["summary"]} >= {"certified", "smoothed,"}
    assert Path(run.json["report"]).is_file()


def test_a_prepared_dataset_and_a_trained_model_need_no_training(finished_flow, tmp_path):
    data, model = (step_folder(finished_flow, step) for step in ("prepare", "train.columns"))
    out = tmp_path / "mine.yaml"
    made = call(
        *("init", "--task", "certify", "--data", data, "--model", model / "model"),
        *("--out", out, "--json"),
    )
    assert made.code == 0, made.err
    found = made.json["found"]
    held = json.loads((data / "dataset.json").read_text())["splits"]
    assert found["splits"] == {name: held[name]["num_items"] for name in ("train", "val", "test")}
    recipe = api.load_recipe(out)
    assert recipe.train is None
    assert recipe.certify["patch"].kind == "columns"
    assert api.lint(out) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--data", "nowhere"], "nowhere"),
        (["--task", "bake"], "--task: bake is unknown"),
        (["--out", "there.yaml"], "--force"),
        (["--task", "tune", "--model", "m"], "--model"),
    ],
)
def test_refusals_are_one_line(tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    Path("there.yaml").write_text("mine")
    assert said in mistake_of("init", *arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["there.yaml"]
    assert Path("there.yaml").read_text() == "mine"


def test_the_table_of_published_results(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = call("recipes", "--table", "smoothed-vit", "--no-costs")
    assert told.code == 0, told.err
    for word in ("Table 8", "svit-in1k-col19-wrn", "not covered: ", "needs data: data/imagenet"):
        assert word in told.out
    rows = call("recipes", "--table", "--no-costs", "--json").json
    assert {row["paper"] for row in rows} == {
        *("attention-scaling", "denoised-smoothing", "robust-xcit", "smoothed-vit"),
        *("understanding-vit", ""),
    }
    page = call("recipes", "--table", "smoothed-vit", "--markdown").out
    widths = {line.count("|") for line in page.splitlines() if line.startswith("|")}
    assert widths == {4, 5}  # two tables
    assert "| cost on one A100, fp32 |" in page
    assert re.search(r"^\| `svit-in1k-col19-vit-s` \| [\d,.]+ h \|", page, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--table", "vits"], "vits is unknown; choose attention-scaling"),
        (["demo", "--no-costs"], "--no-costs: applies to --table only"),
        (["--table", "--smoke"], "--smoke: does not apply to --table"),
        (["--table", "--accelerator", "Z80", "smoothed-vit"], "Z80"),
        (["--table", "--storage", "nowhere", "--no-costs"], "nowhere"),
        (["--table", "--json", "--markdown"], "--markdown"),
    ],
)
def test_refusals_of_the_table_are_one_line(tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    assert said in mistake_of("recipes", *arguments).splitlines()[-1]
