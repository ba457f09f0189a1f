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
    run.origin({"mlflow.user": "alice", "casemate.recipe": "own"})
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
    assert model.tags["mlflow.user"] == "alice"
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


def test_what_is_told_of_a_run_is_told_of_its_trials(tracker, open_run):
    run = open_run()
    run.origin({"casemate.recipe": "tiny", "mlflow.source.name": "http://alice:hunter2x@host/a"})
    about = {"digest": "d" * 64, "source": "here", "context": "tuning", "profile": {}}
    run.dataset(name="digits", **about)
    run.child("trial-0", {"casemate.trial": "0"}).finish()
    parent = f"tags.`mlflow.parentRunId` = '{run.run_id}'"
    (trial,) = tracker.client.search_runs([tracker.experiment_id], parent)
    for found in (trial, tracker.client.get_run(run.run_id)):
        assert found.data.tags["casemate.recipe"] == "tiny"
        assert "hunter2x" not in str(found.data.tags)
        (entry,) = found.inputs.dataset_inputs
        assert (entry.dataset.name, entry.dataset.digest) == ("digits", "d" * 36)


def test_results_of_a_flow_are_told_once_and_again_when_they_change(tracker, open_run):
    run = open_run()
    for value in (0.5, 0.5, 0.25, 0.25):
        run.results({"attack/linf/main/robust_accuracy": value})
    key = "attack/linf/main/robust_accuracy"
    history = tracker.client.get_metric_history(run.run_id, key)
    assert [metric.value for metric in history] == [0.5, 0.25]
    assert tracker.client.get_run(run.run_id).data.metrics[key] == 0.25


def test_a_description_of_a_user_stays(tracker, open_run):
    run, note = open_run(), "mlflow.note.content"
    for text in ("first", "second"):
        run.note(text)
        assert tracker.client.get_run(run.run_id).data.tags[note] == text
    tracker.client.set_tag(run.run_id, note, "of a user")
    run.note("third")
    assert tracker.client.get_run(run.run_id).data.tags[note] == "of a user"
    tracker.client.set_tag(run.run_id, note, "")
    run.note("a line\n" * 2000)
    shown = tracker.client.get_run(run.run_id).data.tags[note]
    assert len(shown) <= 8000
    assert shown.endswith("a line\n…")


def test_each_recipe_has_an_experiment_and_an_earlier_flow_goes_on_in_the_shared_one(
    tracker, storage
):
    """`tracker` has the experiment that all recipes shared in version 0.1."""
    began = tracker.flow_run("early", "f" * 64, outbox=storage / "early.jsonl")
    began.complete()
    where = {"storage": Storage.at(storage), "recipe": "early"}
    again = Tracker(TrackingSection(), **where, flow="f" * 64)
    assert again.experiment_id == tracker.experiment_id
    run = again.flow_run("early", "f" * 64, outbox=storage / "early.jsonl")
    assert run.run_id == began.run_id
    other = Tracker(TrackingSection(), **where, flow="0" * 64)
    experiment = other.client.get_experiment(other.experiment_id)
    assert experiment.name == "early"
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
    named = Tracker(TrackingSection(experiment="mine"), **where, flow="f" * 64)
    assert named.client.get_experiment(named.experiment_id).name == "mine"


def test_a_view_that_a_user_chose_stays(tracker, storage):
    chosen = {"mlflow.experimentKind": "genai_development"}
    tracker.client.create_experiment("chosen", tags=chosen)
    found = Tracker(TrackingSection(), storage=Storage.at(storage), recipe="chosen")
    assert found.client.get_experiment(found.experiment_id).tags == chosen


def test_the_model_of_another_recipe_is_found_in_its_experiment(tracker, storage, open_run):
    """Recipes share trainings; the results of one are told of the model of the other."""
    run = open_run()
    model = tracker.client.create_logged_model(
        tracker.experiment_id, name="shared", source_run_id=run.run_id
    )
    tracker.client.finalize_logged_model(model.model_id, "READY")
    other = Tracker(TrackingSection(), storage=Storage.at(storage), recipe="other")
    attack = other.flow_run("other", "1" * 64, outbox=storage / "other.jsonl")
    attack.metrics({"attack/linf/main/robust_accuracy": 0.5}, trained_in=run.run_id)
    (found,) = tracker.client.get_logged_model(model.model_id).metrics
    assert (found.key, found.value, found.run_id) == (
        "attack/linf/main/robust_accuracy", 0.5, attack.run_id
    )  # fmt: skip
    attack.metrics({"attack/linf/columns/robust_accuracy": 0.5}, trained_in="0" * 32)  # not here
