"""The demo against `mlflow server` on Postgres: runs, models, artifacts, two flows at once."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import mlflow
import numpy as np
import psycopg
import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from components.core.digests import digest_file
from components.data.prepared import PreparedDataset
from components.models.checkpoint import load_model
from pipelines.recipe.schema.place import TrackingSection
from pipelines.runtime.storage import Storage
from pipelines.runtime.tracking import Tracker
from tests.cluster.servers import PASSWORD
from tests.e2e.cli import TINY, Cli, call, step_folder, write_recipe

pytestmark = pytest.mark.cluster
MODELS = ("main", "standard", "columns", "noisy")
LOADS = """
import sys, mlflow, numpy as np
model = mlflow.pyfunc.load_model(sys.argv[1])
images = np.load(sys.argv[2])
params = {"seed": 3, "num_estimate": 100} if "smoothed" in sys.argv[1] else None
np.save(sys.argv[3], np.asarray(model.predict(images, params=params), dtype=np.float64))
"""


@pytest.fixture(scope="module")
def demo(mlflow_server, tmp_path_factory):
    """The whole demo, shrunk; the server is named by the environment alone."""
    storage = tmp_path_factory.mktemp("demo")
    process = Cli().start(
        "run", "demo", "--smoke", "--storage", storage, "--json",
        env={"MLFLOW_TRACKING_URI": mlflow_server.uri},
    )  # fmt: skip
    out, err = process.communicate(timeout=590)
    assert process.returncode == 0, err
    assert json.loads(out)["tracking_uri"] == mlflow_server.uri
    assert not (storage / "mlflow.db").exists()
    return storage


@pytest.fixture(scope="module")
def client(mlflow_server):
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(mlflow_server.uri)  # `models:/` addresses are looked up there
    yield MlflowClient(mlflow_server.uri)
    mlflow.set_tracking_uri(before)
    os.environ.pop("MLFLOW_TRACKING_URI", None)


@pytest.fixture(scope="module")
def experiment(client, demo):
    return client.get_experiment_by_name("demo").experiment_id


@pytest.fixture(scope="module")
def runs(client, experiment):
    found = client.search_runs([experiment], "tags.`casemate.recipe` = 'demo'", max_results=200)
    (parent,) = [run for run in found if "mlflow.parentRunId" not in run.data.tags]
    nested = client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'")
    return parent, {run.data.tags["casemate.step"]: run for run in nested}


def test_every_step_is_a_finished_run_with_its_dataset(runs, demo):
    parent, steps = runs
    assert {run.info.status for run in (parent, *steps.values())} == {"FINISHED"}
    for step, run in steps.items():
        manifest = json.loads((step_folder(demo, step) / "manifest.json").read_text())
        assert manifest["mlflow_run_id"] == run.info.run_id
        assert len(run.inputs.dataset_inputs) == 1


def test_results_are_found_through_the_server_that_keeps_the_artifacts(mlflow_server, runs, demo):
    """Runs name the storage of their steps: the addresses of proxied artifacts do not."""
    assert runs[0].info.artifact_uri.startswith("mlflow-artifacts:")
    said = call("leaderboard", "--tracking", mlflow_server.uri, "--json")
    assert said.code == 0, said.err
    assert {e["label"] for b in said.json["boards"] for e in b["entries"]} >= {"demo/main"}
    card = call("card", f"mlflow:{runs[1]['train.main'].info.run_id}", "--json",
                "--tracking", mlflow_server.uri)  # fmt: skip
    assert card.code == 0, card.err


def test_epochs_and_machine_load_are_logged_once(client, runs, demo):
    for name in MODELS:
        run = runs[1][f"train.{name}"]
        rows = json.loads((step_folder(demo, f"train.{name}") / "history.json").read_text())["rows"]
        history = client.get_metric_history(run.info.run_id, "train/loss")
        assert [(m.step, m.value) for m in history] == [(r["epoch"], r["loss"]) for r in rows]
        assert 0 < run.data.metrics["system/system_memory_usage_percentage"] < 100
        assert "system/cpu_utilization_percentage" in run.data.metrics


def test_certificates_and_report_are_artifacts(client, runs, demo):
    wanted = {
        "attack.linf": ("attacks.parquet", "summary.json"),
        "certify.patch": ("votes.parquet", "certificates.parquet", "certificate.json"),
        "certify.l2": ("votes.parquet", "certificates.parquet", "certificate.json"),
        "report": ("report.html",),
    }
    for step, names in wanted.items():
        for name in names:
            kept = client.download_artifacts(runs[1][step].info.run_id, name)
            assert digest_file(Path(kept)) == digest_file(step_folder(demo, step) / name)


def test_versions_have_model_alias_and_tags(client, runs, demo):
    for name in MODELS:
        version = client.get_model_version_by_alias(f"demo-{name}", "candidate")
        assert version.version == "1"
        assert version.run_id == runs[1][f"train.{name}"].info.run_id
        assert client.get_logged_model(version.source.removeprefix("models:/")).status == "READY"
        assert version.tags["validation_status"] == "passed"
    attacked = client.get_model_version_by_alias("demo-main", "candidate").tags
    assert attacked["robustness.threat"] == "linf 0.1"
    assert attacked["robustness.verdict"] == "reliable"
    smoothed = client.get_model_version_by_alias("demo-l2-smoothed", "candidate").tags
    digest = digest_file(step_folder(demo, "certify.l2") / "certificate.json")
    assert smoothed["certificate.digest"] == digest
    assert smoothed["robustness.verdict"] == "certified"
    certified = client.get_model_version_by_alias("demo-noisy", "candidate").tags
    assert certified["certificate.digest"] == digest


def test_models_are_ranked_by_robust_accuracy(client, experiment, demo):
    by = {"field_name": "metrics.attack/linf/clean_accuracy", "ascending": False}
    ranked = client.search_logged_models([experiment], order_by=[by])
    summary = json.loads((step_folder(demo, "attack.linf") / "summary.json").read_text())["models"]
    wanted = sorted(summary, key=lambda name: -summary[name]["clean_accuracy"]["value"])
    assert [model.name for model in ranked][:2] == [f"demo-{name}" for name in wanted]
    digest = json.loads((step_folder(demo, "prepare") / "dataset.json").read_text())["digest"]
    for model, name in zip(ranked, wanted, strict=False):
        (own,) = [m for m in model.metrics if m.key == "attack/linf/robust_accuracy"]
        assert own.value == summary[name]["robust_accuracy"]["value"]
        assert digest.startswith(own.dataset_digest)


@pytest.mark.parametrize("name", ["demo-main", "demo-l2-smoothed"])
def test_another_process_loads_a_model_through_the_server(mlflow_server, demo, tmp_path, name):
    items = PreparedDataset.open(step_folder(demo, "prepare")).load("test", limit=3)
    images = items.pixels()
    np.save(tmp_path / "images.npy", images.numpy())
    subprocess.run(
        [sys.executable, "-c", LOADS, f"models:/{name}@candidate", *(
            str(tmp_path / file) for file in ("images.npy", "answers.npy"))],
        env={**os.environ, "MLFLOW_TRACKING_URI": mlflow_server.uri}, cwd=tmp_path, check=True,
    )  # fmt: skip
    answers = np.load(tmp_path / "answers.npy")
    if name == "demo-main":
        ours = load_model(step_folder(demo, "train.main") / "model")(images).detach().numpy()
        np.testing.assert_allclose(answers, ours, rtol=1e-4, atol=1e-5)
    else:
        assert answers.shape == (3, 4)
        assert set(answers[:, 0]) <= {-1, *range(10)}


def test_a_second_run_of_a_finished_flow_logs_nothing(mlflow_server, client, experiment, demo):
    before = {r.info.run_id: r.info.end_time for r in client.search_runs([experiment])}
    result = Cli()(
        "run", "demo", "--smoke", "--storage", demo, env={"MLFLOW_TRACKING_URI": mlflow_server.uri}
    )
    assert result.code == 0
    assert f"mlflow: {mlflow_server.uri}" in result.out
    assert {r.info.run_id: r.info.end_time for r in client.search_runs([experiment])} == before


def test_two_flows_at_once_share_experiment_model_and_alias(mlflow_server, client, tmp_path):
    """The same recipe into two storages at the same time, into an experiment that is new."""
    values = {
        **{key: TINY[key] for key in ("name", "seed", "data", "model")},
        "train": {**TINY["train"], "variants": {}, "epochs": 2},
        "tracking": {"uri": mlflow_server.uri, "experiment": "both"},
        "cluster": {"num_cpus": 1, "object_store_mb": 100},
    }
    recipe = write_recipe(tmp_path / "both.yaml", {**values, "name": "both"})
    flows = [
        Cli().start(
            "run", recipe, "--storage", tmp_path / place, env={"RAY_TMPDIR": f"/tmp/{place}"}
        )
        for place in ("cm1", "cm2")
    ]
    for flow in flows:
        _, err = flow.communicate(timeout=590)
        assert flow.returncode == 0, err
    found = client.get_experiment_by_name("both")
    versions = client.search_model_versions("name = 'both-main'")
    assert sorted(version.version for version in versions) == ["1", "2"]
    assert client.get_registered_model("both-main").aliases == {"candidate": "2"}
    logged = client.search_logged_models([found.experiment_id])
    assert [model.status for model in logged] == ["READY", "READY"]


def test_experiments_and_aliases_do_not_race(mlflow_server, client, tmp_path):
    """Eight threads make one experiment and move one alias; all agree at the end."""
    trackers, errors = [], []

    def connect() -> None:
        try:
            section = TrackingSection(uri=mlflow_server.uri, experiment="race")
            trackers.append(Tracker(section, storage=Storage.at(tmp_path)))
        except Exception as error:
            errors.append(error)

    _at_once([connect] * 8)
    assert errors == []
    (experiment,) = {tracker.experiment_id for tracker in trackers}
    registry = trackers[0].registry
    run = client.create_run(experiment).info.run_id
    model = client.create_logged_model(experiment, name="x", source_run_id=run)
    content = {"name": "race", "tags": {}, "description": ""}

    def register() -> None:
        try:
            registry._new_version(run, model, content)
            registry._move_alias("race", "candidate")
        except Exception as error:
            errors.append(error)

    _at_once([register] * 6)
    assert errors == []
    assert client.get_registered_model("race").aliases == {"candidate": "6"}


def test_a_failed_registration_leaves_nothing_behind(mlflow_server, client, tmp_path):
    section = TrackingSection(uri=mlflow_server.uri, experiment="failing")
    tracker = Tracker(section, storage=Storage.at(tmp_path))
    run = tracker.flow_run("failing", "f" * 64, {}, outbox=tmp_path / "outbox")
    broken = tmp_path / "model"
    broken.mkdir()
    (broken / "model.json").write_text("{}")
    with pytest.raises(Exception, match=r"model\.json|spec"):
        run.register_model(broken, name="failing", alias="candidate", step=0, metadata={})
    assert client.search_logged_models([tracker.experiment_id]) == []
    with pytest.raises(MlflowException, match="not found"):
        client.get_registered_model("failing")
    with pytest.raises(MlflowException):  # the registry refuses a source that is not there
        tracker.registry._new_version(
            run.run_id, _Absent(), {"name": "failing", "tags": {}, "description": ""}
        )
    with pytest.raises(MlflowException, match="not found"):
        client.get_registered_model("failing")


def test_postgres_itself_can_be_the_store(postgres, tmp_path):
    """Without a server: the password of the URI reaches Postgres and nothing else."""
    uri = postgres.uri.replace("casemate@", f"casemate:{PASSWORD}@")
    recipe = write_recipe(tmp_path / "tiny.yaml", {
        "name": "direct", "data": TINY["data"], "tracking": {"uri": uri, "experiment": "direct"},
    })  # fmt: skip
    result = Cli()("prepare", recipe, "--storage", tmp_path / "runs")
    assert result.code == 0, result.err
    assert PASSWORD not in result.out + result.err
    with psycopg.connect(postgres.uri, password=PASSWORD) as connection:
        rows = connection.execute("SELECT key, value FROM params").fetchall()
        places = connection.execute("SELECT artifact_location FROM experiments").fetchall()
    assert ("tracking.experiment", "direct") in rows
    assert not [row for row in rows if PASSWORD in row[1]]
    assert ((tmp_path / "runs" / "mlartifacts").as_uri(),) in places


def _at_once(calls) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class _Absent:
    """A logged model that the server does not know."""

    model_id = "m-" + 32 * "0"
