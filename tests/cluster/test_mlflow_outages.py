"""The MLflow server goes away in the middle of work: the flow goes on, nothing lost or doubled."""

import json
import time
from collections import Counter

import pytest
from mlflow import MlflowClient

from tests.cluster.servers import Proxy
from tests.e2e.cli import TINY, Cli, step_folder, wait_until, write_recipe

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]
OUTAGE_SECONDS = 60
LONG = {**TINY["train"], "variants": {}, "epochs": 60}
SHORT = {**TINY["train"], "variants": {}, "epochs": 2}
CERTIFY = {"l2": {**TINY["certify"]["l2"], "num_estimate": 40_000, "block_size": 500}}


@pytest.fixture
def server(mlflow_server):
    """Runs before and after a test, whatever the test does with it."""
    yield mlflow_server
    mlflow_server.stop()
    mlflow_server.start()


def flow(tmp_path, server, name: str, *, max_outage: float = 900, **sections):
    tracking = {"uri": server.uri, "experiment": name, "max_outage": max_outage}
    values = {**{key: TINY[key] for key in ("seed", "data", "model", "cluster")}, **sections}
    return write_recipe(tmp_path / f"{name}.yaml", {"name": name, "tracking": tracking, **values})


def told(server, name: str):
    """Client, experiment and the runs of its steps."""
    client = MlflowClient(server.uri)
    experiment = client.get_experiment_by_name(name).experiment_id
    runs = client.search_runs([experiment])
    steps = {r.data.tags["casemate.step"]: r for r in runs if "casemate.step" in r.data.tags}
    assert len(steps) == len(runs) - 1, "one run per step and one for the flow"
    return client, experiment, steps, runs


def check_training(server, name: str, storage) -> None:
    """Every epoch once with its value, every sample of the machine once, one version, one model."""
    client, experiment, steps, runs = told(server, name)
    assert {run.info.status for run in runs} == {"FINISHED"}
    run = steps["train.main"]
    rows = json.loads((step_folder(storage, "train.main") / "history.json").read_text())["rows"]
    for key in ("loss", "train_accuracy", "lr"):
        history = client.get_metric_history(run.info.run_id, f"train/{key}")
        assert [(m.step, m.value) for m in history] == [(r["epoch"], r[key]) for r in rows]
    load = client.get_metric_history(run.info.run_id, "system/cpu_utilization_percentage")
    assert [m.step for m in load] == list(range(len(load)))
    (version,) = client.search_model_versions(f"name = '{name}-main'")
    assert client.get_registered_model(f"{name}-main").aliases == {"candidate": version.version}
    logged = client.search_logged_models([experiment], f"source_run_id = '{run.info.run_id}'")
    assert [model.status for model in logged] == ["READY"]


def epochs_done(storage) -> int:
    try:
        (path,) = storage.glob("*/train.main-*/unfinished/live.json")
        return len(json.loads(path.read_text())["rows"])
    except (ValueError, OSError):
        return 0


def wait_for(process, condition) -> None:
    wait_until(lambda: condition() or process.poll() is not None, seconds=400)
    assert process.poll() is None, process.communicate()


def test_a_minute_without_the_server_in_the_middle_of_training(server, tmp_path):
    storage = tmp_path / "runs"
    recipe = flow(tmp_path, server, "minute-train", train=LONG)
    process = Cli().start("run", recipe, "--storage", storage)
    wait_for(process, lambda: epochs_done(storage) >= 2)
    server.stop()
    stopped, began = epochs_done(storage), time.monotonic()
    wait_for(process, lambda: epochs_done(storage) >= stopped + 4)  # work goes on
    (outbox,) = storage.glob("*/train.main-*/unfinished/outbox.jsonl")
    wait_for(process, lambda: len(outbox.read_text().splitlines()) >= 3)
    wait_for(process, lambda: time.monotonic() > began + OUTAGE_SECONDS)
    server.start()
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert err.count("does not answer") == 1
    assert err.count("answers again after") == 1
    assert not list(storage.rglob("outbox.jsonl"))
    check_training(server, "minute-train", storage)


def test_a_minute_without_the_server_in_the_middle_of_certification(server, tmp_path):
    storage = tmp_path / "runs"
    recipe = flow(tmp_path, server, "minute-certify", train=SHORT, certify=CERTIFY)
    assert Cli()("train", recipe, "--storage", storage).code == 0
    process = Cli().start("run", recipe, "--storage", storage)
    wait_for(process, lambda: list(storage.glob("*/certify.l2-*/unfinished/votes/*/*")))
    server.stop()
    began = time.monotonic()
    wait_for(process, lambda: time.monotonic() > began + OUTAGE_SECONDS)
    server.start()
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    check_training(server, "minute-certify", storage)
    client, _, steps, _ = told(server, "minute-certify")
    folder, run_id = step_folder(storage, "certify.l2"), steps["certify.l2"].info.run_id
    names = {artifact.path for artifact in client.list_artifacts(run_id)}
    assert {"votes.parquet", "certificates.parquet", "certificate.json"} <= names
    summary = json.loads((folder / "certificate.json").read_text())["summary"]
    for entry in summary["certified"]:
        key = f"certify/l2/accuracy_at_{entry['radius']:.2f}"
        history = client.get_metric_history(run_id, key)
        assert [m.value for m in history] == [entry["accuracy"]["value"]]
    assert len(client.search_model_versions("name = 'minute-certify-l2-smoothed'")) == 1


def test_a_longer_outage_ends_with_one_line_and_is_resumed(server, tmp_path):
    storage = tmp_path / "runs"
    recipe = flow(tmp_path, server, "longer", max_outage=8, train={**LONG, "epochs": 12})
    process = Cli().start("run", recipe, "--storage", storage)
    wait_for(process, lambda: epochs_done(storage) >= 2)
    server.stop()
    _, err = process.communicate(timeout=600)
    assert process.returncode == 1
    last = [line for line in err.splitlines() if line.startswith("casemate: failed")]
    assert len(last) == 1
    assert "has not answered for" in last[0]
    assert "(tracking.max_outage: 8)" in last[0]
    assert "Traceback" not in err
    assert list(storage.glob("*/train.main-*/unfinished/outbox.jsonl"))
    again = Cli()("run", recipe, "--storage", storage)  # still away: refused at once
    assert again.code == 2
    assert f"tracking.uri: {server.uri} does not answer (Connection refused)" in again.err
    server.start()
    resumed = Cli()("run", recipe, "--storage", storage)
    assert resumed.code == 0, resumed.err
    check_training(server, "longer", storage)


def test_lost_requests_and_lost_answers_change_nothing(server, tmp_path):
    """Every 67th call or its answer is lost, through training, attack, certificates, report."""
    proxy = Proxy(server.uri, lose_every=67)
    storage = tmp_path / "runs"
    sections = {key: TINY[key] for key in ("attack", "certify")}
    recipe = flow(tmp_path, server, "lossy", train={**TINY["train"], "epochs": 3}, **sections)
    uri = f"tracking.uri=http://{proxy.address}"
    process = Cli().start("run", recipe, "--storage", storage, "--set", uri)
    _, err = process.communicate(timeout=900)
    proxy.close()
    assert process.returncode == 0, err
    assert proxy.num_lost >= 3
    client, experiment, steps, runs = told(server, "lossy")
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert set(Counter(r.data.tags["casemate.step"] for r in steps.values()).values()) == {1}
    for name in ("main", "columns"):
        rows = json.loads((step_folder(storage, f"train.{name}") / "history.json").read_text())
        history = client.get_metric_history(steps[f"train.{name}"].info.run_id, "train/loss")
        assert [(m.step, m.value) for m in history] == [
            (row["epoch"], row["loss"]) for row in rows["rows"]
        ]
        assert len(client.search_model_versions(f"name = 'lossy-{name}'")) == 1
    statuses = [model.status for model in client.search_logged_models([experiment])]
    assert statuses == ["READY"] * 3
    for step in ("certify.patch", "certify.l2"):
        names = {a.path for a in client.list_artifacts(steps[step].info.run_id)}
        assert {"votes.parquet", "certificates.parquet", "certificate.json"} <= names
