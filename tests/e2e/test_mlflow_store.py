"""What a team finds in the MLflow store of a finished flow, also in a copy of it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import mlflow
import pytest
import torch
import yaml
from mlflow import MlflowClient

from components.core.digests import digest_file
from pipelines.recipe.load import load
from pipelines.runtime import moved_artifacts
from tests.e2e.cli import WHOLE, step_folder

pytestmark = pytest.mark.e2e
TRAINED = ("main", "columns")
# A process of its own: the entry point of the package must find a copy.
OPENED = """
import sys
import mlflow
from mlflow import MlflowClient
uri, run, model = sys.argv[1:]
mlflow.set_tracking_uri(uri)
print(open(MlflowClient(uri).download_artifacts(run, "report.html")).read())
print(type(mlflow.pytorch.load_model(f"models:/{model}@candidate")).__name__)
"""
MARK = "the copy's own"


def read(path: Path) -> dict:
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def client(finished_flow):
    return MlflowClient(f"sqlite:///{finished_flow}/mlflow.db")


@pytest.fixture(scope="module")
def experiment(client):
    return client.get_experiment_by_name(WHOLE["name"])


@pytest.fixture(scope="module")
def runs(client, experiment):
    """Every run of the flow by its name."""
    return {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}


@pytest.fixture
def copied(finished_flow, tmp_path):
    """A copy of the storage, as the default store of this process."""
    moved_artifacts.register()
    storage = shutil.copytree(finished_flow, tmp_path / "another place")
    (report,) = storage.glob("mlartifacts/*/artifacts/cards/../report.html")  # of the flow's run
    report.write_text(MARK)
    uri, before = f"sqlite:///{storage}/mlflow.db", mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(uri)
    yield storage, uri
    mlflow.set_tracking_uri(before)


def test_the_experiment_of_the_recipe_opens_in_the_view_of_trainings(client, experiment):
    named = {found.name for found in client.search_experiments()}
    assert named == {WHOLE["name"], "Default"}  # MLflow makes the other one
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"


def test_the_run_of_the_flow_has_the_figures_of_its_steps(runs, finished_flow):
    parent = runs["tiny"].data.metrics
    for step in ("attack.linf", "certify.patch", "certify.l2", "certify.early"):
        own = runs[step].data.metrics
        shared = parent.keys() & own.keys()
        assert any(key.endswith(("robust_accuracy", "accuracy_at_1", "0.05")) for key in shared)
        assert {key: parent[key] for key in shared} == {key: own[key] for key in shared}
    final = read(step_folder(finished_flow, "train.main") / "metrics.json")["final"]
    assert parent["train/main/val_accuracy"] == final["val_accuracy"]
    assert not any(key.startswith(("live/", "system/")) for key in parent)


def test_the_run_of_the_flow_has_report_cards_and_recipe(client, runs, finished_flow, tmp_path):
    run_id = runs["tiny"].info.run_id
    folder = step_folder(finished_flow, "report")
    for name in ("report.html", "cards/main.html", "cards/main.md", "cards/columns.html"):
        kept = Path(client.download_artifacts(run_id, name, str(tmp_path)))
        assert digest_file(kept) == digest_file(folder / name)
    recipe = Path(client.download_artifacts(run_id, "recipe.yaml", str(tmp_path)))
    assert load(str(recipe)).resolved() == load(str(finished_flow.parent / "tiny.yaml")).resolved()
    assert yaml.safe_load(recipe.read_text())["train"]["weight_decay"] is not None  # a default
    note = runs["tiny"].data.tags["mlflow.note.content"]
    assert "| main | certified l2 0.05, l2 |" in note


def test_parameters_are_named_as_in_the_recipe_and_not_twice(runs):
    parent = runs["tiny"].data.params
    assert len(parent) < 20
    assert parent["model.architecture"] == WHOLE["model"]["architecture"]
    train = runs["train.columns"].data.params
    assert train["train.objective.kind"] == "columns"
    assert train["train.epochs"] == str(WHOLE["train"]["variants"]["columns"]["epochs"])
    assert "train.weight_decay" in train
    for run in runs.values():
        parts = [key.split(".") for key in run.data.params]
        assert not any(first == second for first, second, *_ in (p for p in parts if len(p) > 1))


def test_every_run_tells_its_recipe_user_source_and_dataset(runs, finished_flow):
    digest = read(step_folder(finished_flow, "prepare") / "dataset.json")["digest"]
    revision = read(step_folder(finished_flow, "report") / "manifest.json")["git_revision"]
    for name, run in runs.items():
        tags = run.data.tags
        assert tags["casemate.recipe"] == WHOLE["name"], name
        assert tags["casemate.dataset_digest"] == digest, name
        assert tags["mlflow.source.name"].endswith("tiny.yaml"), name
        assert tags["mlflow.source.type"] == "LOCAL"
        assert tags["mlflow.user"]
        assert tags.get("casemate.git_revision") == revision
        (entry,) = run.inputs.dataset_inputs
        assert (entry.dataset.name, entry.dataset.digest) == ("digits", digest[:36]), name


def test_models_are_ranked_by_what_was_found_about_them(client, runs, experiment, finished_flow):
    robust = read(step_folder(finished_flow, "attack.linf") / "summary.json")["models"]["main"]
    (entry,) = runs["attack.linf"].inputs.dataset_inputs
    data = {"dataset_name": entry.dataset.name, "dataset_digest": entry.dataset.digest}
    key = "attack/linf/robust_accuracy"
    found = ranked(client, experiment, f"metrics.{key}", **data)
    assert found[0].name == "tiny-main"
    assert found[0].tags["mlflow.source.name"].endswith("tiny.yaml")
    assert {m.value for m in found[0].metrics if m.key == key} == {
        robust["robust_accuracy"]["value"]
    }
    found = ranked(client, experiment, "metrics.certify/accuracy_at_0.05", **data)
    smoothed = {"tiny-l2-smoothed", "tiny-early-smoothed", "tiny-denoised-smoothed"}
    assert {model.name for model in found[:3]} == smoothed
    certified = [read(step_folder(finished_flow, f"certify.{model.name.split('-')[1]}")
                      / "certificate.json")["summary"]["certified"][0]["accuracy"]["value"]
                 for model in found[:3]]  # fmt: skip
    assert certified == sorted(certified, reverse=True)
    found = ranked(client, experiment, "metrics.certify/patch/accuracy_at_1", **data)
    assert found[0].name == "tiny-columns"


def ranked(client: MlflowClient, experiment, metric: str, **dataset: str):
    """Logged models, the best first."""
    order = [{"field_name": metric, "ascending": False, **dataset}]
    return client.search_logged_models([experiment.experiment_id], order_by=order)


@pytest.mark.parametrize("name", TRAINED)
def test_a_registered_version_is_described_by_its_card(client, finished_flow, name):
    described = client.get_registered_model(f"tiny-{name}").description
    assert "recipe tiny" in described
    assert WHOLE["model"]["architecture"] in described
    version = client.get_model_version_by_alias(f"tiny-{name}", "candidate")
    card = (step_folder(finished_flow, "report") / "cards" / f"{name}.md").read_text()
    assert version.description.splitlines()[0] == card.splitlines()[0]
    assert len(version.description) <= 5000
    smoothed = client.get_model_version_by_alias("tiny-l2-smoothed", "candidate")
    assert "| main | certified l2 0.05 |" in smoothed.description


def test_a_copied_store_opens_at_its_new_place(copied, runs, finished_flow):
    """While the original is there, too: all that is read and written is the copy's."""
    storage, uri = copied
    client, run_id = MlflowClient(uri), runs["tiny"].info.run_id
    assert Path(client.download_artifacts(run_id, "report.html")).read_text() == MARK
    assert mlflow.artifacts.load_text(f"runs:/{run_id}/report.html") == MARK
    with torch.no_grad():
        model = mlflow.pytorch.load_model("models:/tiny-main@candidate")
        assert model(torch.zeros(1, 1, 8, 8)).shape == (1, 10)
    client.log_text(run_id, "new", "later.txt")
    assert len(list(storage.glob("mlartifacts/*/artifacts/later.txt"))) == 1
    assert not list(finished_flow.glob("mlartifacts/*/artifacts/later.txt"))


def test_a_process_without_casemate_code_opens_a_copy(copied, runs):
    storage, uri = copied
    command = [sys.executable, "-c", OPENED, uri, runs["tiny"].info.run_id, "tiny-columns"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MLFLOW_TRACKING")}
    done = subprocess.run(
        command, cwd=storage, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [MARK, "GraphModule"], "stale installation? make setup"
