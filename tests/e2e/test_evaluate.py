"""`casemate evaluate`: all suites through the command line; kills and workers change no byte."""

import json
from functools import partial

import pyarrow.parquet as pq
import pytest
from mlflow import MlflowClient

from components.evaluate.metrics import read_metrics
from tests.e2e.cli import call, mistake_of, step_folder, write_recipe
from tests.unit.published import (
    SIDE,
    write_cifar_c,
    write_imagenet_model,
    write_imagenet_sets,
)

pytestmark = pytest.mark.e2e
FILES = ("metrics.parquet", "predictions.parquet", "summary.json")


@pytest.fixture
def places(finished_flow):
    """(model folder, prepared dataset) of a finished flow."""
    return step_folder(finished_flow, "train.main") / "model", step_folder(finished_flow, "prepare")


def command(places, storage, *further):
    model, data = places
    return ("evaluate", "--model", model, "--data", data, "--storage", storage,
            "--set", "evaluate.micro_batch=1", *further)  # fmt: skip


@pytest.mark.ray
def test_workers_and_a_kill_change_no_byte(kept_workers, cli, places, finished_flow, tmp_path):
    """Killed in the middle of the corruptions with one worker, ended by two."""
    one, two = tmp_path / "one", tmp_path / "two"
    further = step_folder(finished_flow, "train.columns") / "model"
    suites = ("--suite", "corruptions,transfer,spatial", "--json",
              "--set", f"evaluate.transfer.models.columns={further}",
              "--set", "evaluate.spatial.grid={max_shift: 1, num_shifts: 3, num_angles: 3}",
              "--set", "evaluate.spatial.early_exit=false")  # fmt: skip

    def parts() -> dict[str, int]:
        found = two.glob("*/evaluate.corruptions-*/unfinished/parts/*/*.arrow")
        return {path.name: path.stat().st_mtime_ns for path in found}

    alone = ("--set", "cluster.num_actors=1", "--set", "cluster.num_cpus=2")
    cli.kill_when(lambda: len(parts()) >= 3, *command(places, two, *suites, *alone))
    kept = parts()
    assert 3 <= len(kept) < 8  # of 19 units
    assert not (step_folder(two, "evaluate.corruptions") / "manifest.json").exists()
    whole = call(*command(places, one, *suites, "--set", "cluster.num_actors=1"))
    assert whole.code == 0, whole.err
    said = call(*command(places, two, *suites, "--set", "cluster.num_actors=2"))
    assert said.code == 0, said.err
    assert "done before" in said.err  # the clean items
    assert whole.json["summary"] == said.json["summary"]
    for suite, further in (("clean", ()), ("corruptions", ()), ("transfer", ("matrix.parquet",)),
                           ("spatial", ("failure_map.parquet",))):  # fmt: skip
        for name in (*FILES, *further):
            left, right = (step_folder(root, f"evaluate.{suite}") / name for root in (one, two))
            assert left.read_bytes() == right.read_bytes(), (suite, name)
    rows = read_metrics(step_folder(one, "evaluate.corruptions") / "metrics.parquet")
    found = {(row.item, row.metric): row for row in rows if row.level is None}
    assert 0 <= found["all", "mean95"].lo95 <= found["all", "mean95"].value <= 1
    assert found["all", "mce"].value is None  # of 10 classes
    runs = MlflowClient(f"sqlite:///{one}/mlflow.db").search_runs(["1"])
    logged = {name: value for run in runs for name, value in run.data.metrics.items()}
    assert logged["evaluate/corruptions/mean95"] == found["all", "mean95"].value
    assert logged["evaluate/corruptions/fog/s3/accuracy"] <= 1


@pytest.mark.ray
def test_published_datasets_are_read_where_they_lie(kept_workers, places, tmp_path):
    sets = write_imagenet_sets(tmp_path)
    stored = {"source": "imagenet_v2", "path": str(sets["v2"]), "options": {"subset": True}}
    recipe = write_recipe(
        tmp_path / "sets.yaml",
        {
            "name": "sets",
            "data": {**stored, "image_size": SIDE, "fit": "squash"},
            "model": {"pretrained": str(write_imagenet_model(tmp_path / "model"))},
            "evaluate": {
                "corruptions": {"source": "imagenet_c", "path": str(sets["c"])},
                "shifts": {
                    "r": {**stored, "source": "imagenet_r", "path": str(sets["r"])},
                    "v2": stored,
                },
                "shape_bias": {"path": str(sets["cue"])},
            },
        },
    )
    said = call("evaluate", recipe, "--storage", tmp_path / "runs", "--json")
    assert said.code == 0, said.err
    whats = [row["what"] for row in said.json["summary"]]
    assert whats[:3] == ["clean", "shift r, masked", "shift v2, masked"]
    assert "shape accuracy" in whats
    folder = step_folder(tmp_path / "runs", "evaluate.corruptions")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["models"]["main"]["metrics"]["mean95"] is None
    v2 = pq.read_table(step_folder(tmp_path / "runs", "evaluate.shifts") / "predictions.parquet")
    assert {row["label"] for row in v2.to_pylist()} == {1, 6, 10, 988}  # folder 10 is class 10
    write_cifar_c(tmp_path / "cifar", ["fog"])
    digits = ("--suite", "corruptions", "--num-items", 4,
              "--set", "evaluate.corruptions.source=cifar10_c",
              "--set", f"evaluate.corruptions.path={tmp_path / 'cifar'}")  # fmt: skip
    said = call(*command(places, tmp_path / "cifar-runs", *digits))
    assert said.code == 0, said.err
    folder = step_folder(tmp_path / "cifar-runs", "evaluate.corruptions")
    rows = [row for row in read_metrics(folder / "metrics.parquet") if row.item == "fog"]
    assert {row.n for row in rows} == {4}


mistake = partial(mistake_of, "evaluate")


def test_mistakes_are_one_line(places, tmp_path):
    model, data = places
    both = ("--model", model, "--data", data)
    sets = write_imagenet_sets(tmp_path)
    assert mistake() == "evaluate: --model is missing; name a RECIPE, or --model and --data"
    told = mistake("demo", "--suite", "spatial")
    assert told.startswith("--suite: spatial cannot be combined with RECIPE")
    assert "did you mean 'spatial'?" in mistake(*both, "--suite", "spacial")
    assert mistake(*both, "--suite", "shifts").startswith("--suite: shifts needs the place of its")
    shape = ("--suite", "shape_bias", "--set", f"evaluate.shape_bias.path={sets['cue']}")
    assert "classes in the data; the suite needs the 1000 of ImageNet" in mistake(
        *both, *shape, "--storage", tmp_path / "s"
    )
    gone = ("--suite", "corruptions", "--set", "evaluate.corruptions.source=cifar10_c",
            "--set", "evaluate.corruptions.path=gone", "--storage", tmp_path / "s")  # fmt: skip
    assert "evaluate.corruptions.path: gone does not exist" in mistake(*both, *gone)
