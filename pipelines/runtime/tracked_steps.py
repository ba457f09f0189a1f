"""Which finished steps a run of MLflow stands for."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote, urlsplit

from components.core.errors import CasemateError, first_line
from pipelines.recipe.credentials import TRACKING
from pipelines.runtime.outbox import UnavailableError
from pipelines.runtime.run_writer import SUPERSEDED_TAG, having
from pipelines.runtime.tracking import FLOW_TAG  # before mlflow: silences it
from pipelines.runtime.tracking_uri import (
    ARTIFACTS,
    FOLDER_TAG,
    RECIPE_TAG,
    SQLITE,
    STORAGE_TAG,
    check_driver,
    check_port,
    credentials_in_environment,
    place_now,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

PARENT_TAG = "mlflow.parentRunId"
MOST_STEPS = 1000


class TrackedStep(NamedTuple):
    """A step as its run names it; `storage` is empty where the run does not tell."""

    run_id: str
    flow: str
    folder: str
    storage: str


def steps_of_run(run_id: str, uri: str) -> list[TrackedStep]:
    """The step of a run, or all current steps of a flow's run."""
    from mlflow.exceptions import MlflowException

    try:
        with _client(uri) as client:
            return _steps(client, run_id, uri)
    except (MlflowException, UnavailableError) as error:
        remedy = f"is not a run of {uri} ({first_line(error)})"
        raise CasemateError("mlflow", run_id, remedy) from error


def all_steps(uri: str) -> list[TrackedStep]:
    """All current steps that a store tracks, in all its experiments."""
    from mlflow.exceptions import MlflowException

    try:
        with _client(uri) as client:
            return sorted(_every_step(client, uri), key=lambda step: (step.flow, step.folder))
    except (MlflowException, UnavailableError) as error:
        raise CasemateError(TRACKING, uri, f"cannot be read ({first_line(error)})") from error


@contextmanager
def _client(uri: str) -> "Iterator[MlflowClient]":
    from mlflow import MlflowClient

    check_driver(uri)
    database = Path(uri.removeprefix(SQLITE))
    if uri.startswith(SQLITE) and not database.is_file():  # MLflow would make a new one
        raise CasemateError(TRACKING, uri, "does not exist")
    check_port(uri)
    with credentials_in_environment(uri) as place:
        yield MlflowClient(place)


def _every_step(client: "MlflowClient", uri: str) -> "Iterator[TrackedStep]":
    recipes: dict[str, str] = {}
    for run in _tagged_runs(client):
        tags = run.data.tags
        if SUPERSEDED_TAG in tags:
            continue
        parent = tags.get(PARENT_TAG, run.info.run_id)
        if parent not in recipes:
            recipes[parent] = client.get_run(parent).data.tags.get(RECIPE_TAG, "")
        if recipes[parent]:
            storage = _storage(run, uri)
            yield TrackedStep(run.info.run_id, recipes[parent], tags[FOLDER_TAG], storage)


def _tagged_runs(client: "MlflowClient") -> "Iterator[Run]":
    """Runs of steps, in pages."""
    experiments = [found.experiment_id for found in client.search_experiments()]
    token: str | None = ""
    while token is not None:
        page = client.search_runs(
            experiments, f"tags.`{FOLDER_TAG}` LIKE '%'", page_token=token or None
        )
        yield from page
        token = page.token or None


def _steps(client: "MlflowClient", run_id: str, uri: str) -> list[TrackedStep]:
    run = client.get_run(run_id)
    if FLOW_TAG in run.data.tags:
        search = having({PARENT_TAG: run_id})
        runs = list(client.search_runs([run.info.experiment_id], search, max_results=MOST_STEPS))
        flow = run
    else:
        runs = [run]
        parent = run.data.tags.get(PARENT_TAG)
        flow = client.get_run(parent) if parent else run
    recipe = flow.data.tags.get(RECIPE_TAG, "")
    found = [
        TrackedStep(r.info.run_id, recipe, r.data.tags[FOLDER_TAG], _storage(r, uri))
        for r in runs
        if FOLDER_TAG in r.data.tags and SUPERSEDED_TAG not in r.data.tags
    ]
    if not found or not recipe:
        raise CasemateError("mlflow", run_id, "is not the run of a current step or flow of ours")
    return sorted(found, key=lambda step: step.folder)


def _storage(run: "Run", uri: str) -> str:
    """The storage above the artifacts of a run; beside the database, if both were copied.

    A run whose artifacts go through a server names its storage.
    """
    before, artifacts, _ = place_now(str(run.info.artifact_uri), uri).partition(f"/{ARTIFACTS}/")
    if not artifacts:
        return str(run.data.tags.get(STORAGE_TAG, ""))
    return unquote(urlsplit(before).path) if before.startswith("file:") else before
