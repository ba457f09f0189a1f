"""One place resolves where runs are tracked; passwords never reach a recipe's values."""

import os

import pytest

from components.core.errors import CasemateError
from components.core.secrets import redact
from pipelines import api
from pipelines.recipe.credentials import credentials_of, refuse_credentials_in_job
from pipelines.recipe.load import with_values
from pipelines.recipe.schema.place import TrackingSection
from pipelines.runtime import tracking_uri as module
from pipelines.runtime.storage import Storage
from pipelines.runtime.tracking_uri import (
    begin_flow,
    check_artifact_client,
    check_driver,
    credentials_in_environment,
    end_flow,
    flow_outbox,
    flow_outboxes,
    how_to_open,
    tracking_uri,
)
from tests.refusals import refusal_of

NAMES = ("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
WITH_PASSWORD = "http://alice:hunter2x@host:5000"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def demo(*overrides: str):
    return api.load_recipe("demo", overrides=overrides)


def test_recipe_before_environment_before_sqlite(tmp_path, monkeypatch):
    assert (
        tracking_uri(TrackingSection(), Storage.at(tmp_path)) == f"sqlite:///{tmp_path}/mlflow.db"
    )
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://other:5000")
    assert tracking_uri(TrackingSection(), Storage.at(tmp_path)) == "http://other:5000"
    assert (
        tracking_uri(TrackingSection(uri="http://host:5000"), Storage.at(tmp_path))
        == "http://host:5000"
    )


def test_a_password_in_the_environment_is_kept_apart(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://bob:hunter3x@third:5000")
    uri = tracking_uri(TrackingSection(), Storage.at(tmp_path))
    assert uri == "http://third:5000"
    assert credentials_of(uri) == ("bob", "hunter3x")


def test_a_recipe_never_holds_the_password(tmp_path):
    recipe = demo(f"tracking.uri={WITH_PASSWORD}")
    again = with_values(recipe, {"seed": 3})
    for own in (recipe, again, api.load_recipe(recipe, smoke=True)):
        assert own.tracking.uri == "http://host:5000"
        assert "hunter2x" not in own.to_yaml() + repr(own) + str(own.resolved())
        with credentials_in_environment(tracking_uri(own.tracking, Storage.at(tmp_path))) as uri:
            assert uri == "http://host:5000"
            assert [os.environ[name] for name in NAMES[1:]] == ["alice", "hunter2x"]
        assert not set(NAMES) & set(os.environ)
    assert redact("it was hunter2x") == "it was ***"


def test_a_password_of_postgres_goes_to_its_own_variable(monkeypatch):
    monkeypatch.setenv("PGPASSWORD", "before")
    recipe = demo("tracking.uri=postgresql://alice:p%40ss-word@host:5432/db")
    assert recipe.tracking.uri == "postgresql://alice@host:5432/db"
    with credentials_in_environment(recipe.tracking.uri) as uri:
        assert uri == "postgresql://alice@host:5432/db"
        assert os.environ["PGPASSWORD"] == "p@ss-word"
    assert os.environ["PGPASSWORD"] == "before"


def test_other_databases_get_it_in_memory_only():
    recipe = demo("tracking.uri=mysql+pymysql://alice:p%40ss-word@host/db")
    assert recipe.tracking.uri == "mysql+pymysql://alice@host/db"
    with credentials_in_environment(recipe.tracking.uri) as uri:
        assert uri == "mysql+pymysql://alice:p%40ss-word@host/db"


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("storage.root=s3://alice:hunter2x@bucket/runs", "storage.root"),
        ("cluster.address=http://alice:hunter2x@head:8265", "cluster.address"),
        ("data.path=https://alice:hunter2x@host/images", "data.path"),
        ("data.path=https://host/images?X-Amz-Signature=hunter2x", "data.path"),
        ("data.options.token=hunter2x", "data.options.token"),
        ("data.options.api_key=hunter2x", "data.options.api_key"),
        ("model.pretrained=https://hunter2x@host/weights", "model.pretrained"),
        ("report.title=see https://h/x?token=hunter2x", "report.title"),
        ("tracking.uri=postgresql://host/db?password=hunter2x", "tracking.uri"),
        ("tracking.uri=http://hunter2x@host", "tracking.uri"),
    ],
)
def test_a_credential_anywhere_else_is_refused_without_showing_it(override, key):
    line = refusal_of(demo, override)
    assert f"{key}: " in line
    assert "hunter2x" not in line


def test_a_recipe_with_a_password_is_not_submitted():
    with pytest.raises(CasemateError, match="--env MLFLOW_TRACKING_USERNAME") as caught:
        refuse_credentials_in_job(demo("tracking.uri=http://alice:hunter2x@fourth:5000"))
    assert "hunter2x" not in str(caught.value)
    refuse_credentials_in_job(demo("tracking.uri=http://fifth:5000"))


def test_a_missing_driver_is_named(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(CasemateError, match=r"pip install 'casemate\[postgres\]'"):
        check_driver("postgresql://host/db")
    check_driver("sqlite:////tmp/x.db")
    check_driver("http://host")


def test_a_missing_client_of_a_bucket_is_named(monkeypatch):
    check_artifact_client("s3://team/runs/mlartifacts")
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(CasemateError, match=r"pip install 'casemate\[s3\]'"):
        check_artifact_client("s3://team/runs/mlartifacts")
    check_artifact_client(None)
    check_artifact_client("file:///x")


def test_how_a_store_is_opened():
    view = "/#/experiments?workflowType=machine_learning"
    assert how_to_open("http://host:5000/") == f"http://host:5000{view}"
    command = "mlflow ui --backend-store-uri 'sqlite:////x.db'"
    assert how_to_open("sqlite:////x.db") == f"{command} (opens at http://127.0.0.1:5000{view})"


def test_a_flow_whose_run_was_not_ended_is_found_until_it_is(tmp_path):
    """Killed after its last step: nothing waits to be sent, and its run is not complete."""
    outbox = flow_outbox(tmp_path, "f" * 64, "prepare")
    begin_flow(outbox)
    begin_flow(flow_outbox(tmp_path, "0" * 64, "prepare"))
    assert flow_outboxes(tmp_path, "f" * 64) == [outbox]
    outbox.write_text("{}")  # and messages wait, too: one outbox
    assert flow_outboxes(tmp_path, "f" * 64) == [outbox]
    end_flow(tmp_path, "f" * 64)
    assert flow_outboxes(tmp_path, "f" * 64) == [outbox]
    outbox.unlink()
    assert flow_outboxes(tmp_path, "f" * 64) == []
    assert len(flow_outboxes(tmp_path, "0" * 64)) == 1
