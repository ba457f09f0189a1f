"""Runs in a real SQLite store: continued, idempotent, registered once; a full disk is one line."""

import mlflow
import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine

from components.core.errors import CasemateError
from components.models.checkpoint import save_model
from components.models.pixels import PixelModel
from components.models.spec import ModelSpec
from pipelines.recipe.schema.place import TrackingSection
from pipelines.runtime import model_registry
from pipelines.runtime.outbox import UnavailableError
from pipelines.runtime.storage import Storage
from pipelines.runtime.tracking import Tracker


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    return tmp_path_factory.mktemp("tracking")


@pytest.fixture(scope="module")
def tracker(storage):
    before = mlflow.get_tracking_uri()
    yield Tracker(TrackingSection(), storage=Storage.at(storage))
    mlflow.set_tracking_uri(before)


@pytest.fixture
def open_run(tracker, storage, request):
    """Opens the run of this test, again and again: as after a kill."""
    name = request.node.name
    return lambda: tracker.flow_run(name, name, outbox=storage / f"{name}.jsonl")


def test_a_restarted_flow_continues_its_run_and_repeats_nothing(tracker, open_run):
    first = open_run()
    first.params({"seed": 3})
    first.metrics({"train/loss": 1.0, "train/lr": None}, step=0)
    first.finish("KILLED")
    second = open_run()
    assert second.run_id == first.run_id
    assert tracker.client.get_run(second.run_id).info.status == "RUNNING"
    for step, loss in enumerate((9.0, 0.5)):  # step 0 is there already
        second.metrics({"train/loss": loss}, step=step)
    second.params({"seed": 4, "train": {"epochs": 2}})
    second.complete()
    history = tracker.client.get_metric_history(second.run_id, "train/loss")
    assert [(m.step, m.value) for m in history] == [(0, 1.0), (1, 0.5)]
    found = tracker.client.get_run(second.run_id)
    assert found.data.params == {"seed": "3", "train.epochs": "2"}
    assert found.info.status == "FINISHED"


def test_credentials_in_values_are_not_told(tracker, open_run):
    run = open_run()
    run.params({"uri": "http://alice:hunter2x@host", "options": {"token": "hunter2x", "n": 1}})
    run.tags({"why": "http://alice:hunter2x@host is away"})
    found = tracker.client.get_run(run.run_id).data
    assert found.params["uri"] == "http://***@host"
    assert found.params["options.token"] == "***"
    assert found.params["options.n"] == "1"
    assert "hunter2x" not in found.tags["why"]


def test_what_an_outage_kept_arrives_with_its_own_time(tracker, open_run, monkeypatch):
    run = open_run()
    real = run.outbox.deliver

    def away(_):
        raise UnavailableError("Connection refused")

    run.outbox.deliver = away
    run.metrics({"a": 1.0})
    child = run.child("trial-0", {"casemate.trial": "0"})
    child.params({"lr": 0.1})
    child.metrics({"b": 2.0}, step=4)
    child.finish("FAILED")
    run.metrics({"a": 3.0}, step=1)
    assert len(run.outbox.path.read_text().splitlines()) == 5
    run.outbox.deliver = real
    run.complete()
    history = tracker.client.get_metric_history(run.run_id, "a")
    assert [(m.step, m.value) for m in history] == [(0, 1.0), (1, 3.0)]
    parent = f"tags.`mlflow.parentRunId` = '{run.run_id}'"
    (trial,) = tracker.client.search_runs([tracker.experiment_id], parent)
    assert (trial.data.params, trial.data.metrics) == ({"lr": "0.1"}, {"b": 2.0})
    assert trial.info.status == "FAILED"


def test_a_model_is_registered_once_whatever_is_interrupted(
    tracker, open_run, tmp_path, monkeypatch
):
    options = {"patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 1}
    network = PixelModel(ModelSpec("tiny_vit", 3, 1, 8, (0.5,), (0.5,), options=options)).eval()
    save_model(tmp_path / "model", network, recipe_digest="")
    run = open_run()
    run.metrics({"train/val_accuracy": 0.25}, step=1)
    described = {"name": "own", "alias": "candidate", "step": 1, "metadata": {"digest": "d"}}

    def broken(*_, **__):
        raise RuntimeError("cannot be exported")

    with monkeypatch.context() as patched:
        patched.setattr(model_registry.Model, "log", broken)
        with pytest.raises(RuntimeError, match="cannot be exported"):
            run.register_model(tmp_path / "model", **described)
    assert tracker.client.search_logged_models([tracker.experiment_id]) == []
    assert tracker.client.search_registered_models() == []
    for _ in range(2):
        run.register_model(tmp_path / "model", **described)
    (version,) = tracker.client.search_model_versions("name = 'own'")
    (model,) = tracker.client.search_logged_models([tracker.experiment_id])
    assert version.source == f"models:/{model.model_id}"
    assert [(m.key, m.value) for m in model.metrics] == [("train/val_accuracy", 0.25)]
    assert version.tags == {"validation_status": "pending"}
    results = {"metrics": {"attack/linf/robust_accuracy": 0.5}}
    for part, verdict in (("linf", "reliable"), ("l2", "suspect")):
        tags = {f"robustness.threat.{part}": part, f"robustness.verdict.{part}": verdict}
        for _ in range(2):
            run.model_results(run.run_id, tags=tags, **results)
    tags = tracker.client.get_model_version("own", "1").tags
    assert tags["robustness.threat"] == "l2, linf"
    assert tags["robustness.verdict"] == "suspect"
    assert tags["validation_status"] == "failed"
    history = tracker.client.get_metric_history(run.run_id, "attack/linf/robust_accuracy")
    assert [m.value for m in history] == [0.5]


def test_a_full_disk_is_one_line(tracker, open_run):
    run = open_run()

    def no_more(connection, _):
        connection.execute("PRAGMA max_page_count = 1")  # the database cannot grow

    event.listen(Engine, "connect", no_more)
    engine = tracker.client._tracking_client.store.engine
    engine.dispose()
    try:
        with pytest.raises(CasemateError, match="the disk is full; free some space") as caught:
            run.metrics({f"m{i}-{'x' * 200}": float(i) for i in range(900)})
    finally:
        event.remove(Engine, "connect", no_more)
        engine.dispose()
    assert len(str(caught.value).splitlines()) == 1
