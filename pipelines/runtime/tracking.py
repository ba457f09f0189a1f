"""Runs in MLflow: one per flow, a child run per step; a second start continues them.

A step goes on while the server is away: what it logs waits in a file beside it (`outbox.py`) and is
sent in order when the server is back. At its end a step waits for that, so that a finished step is
complete in MLflow.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # progress is ours
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # stdout may be JSON
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")  # patience is ours, too
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from components.core.errors import CasemateError, first_line
from components.core.secrets import redact
from pipelines.recipe.credentials import TRACKING
from pipelines.recipe.schema.place import TrackingSection
from pipelines.runtime import moved_artifacts
from pipelines.runtime.model_registry import Registry, default_store
from pipelines.runtime.outbox import Connection, Message, Outbox, UnavailableError
from pipelines.runtime.progress import say
from pipelines.runtime.run_writer import (
    SUPERSEDED_TAG,
    RunWriter,
    find_or_create,
    having,
)
from pipelines.runtime.step_run import StepRun
from pipelines.runtime.storage import Storage
from pipelines.runtime.tracking_errors import EXISTS, sorted_errors
from pipelines.runtime.tracking_uri import (
    RECIPE_TAG,
    artifact_location,
    check_artifact_client,
    check_driver,
    check_port,
    credentials_in_environment,
    default_uri,
    is_server,
    storage_id,
    tracking_uri,
)

FLOW_TAG, STEP_TAG, PRINT_TAG = "casemate.flow", "casemate.step", "casemate.fingerprint"
STORAGE_TAG = "casemate.storage"  # in a shared store the same recipe may run into two storages
EXPERIMENT = "casemate"  # of version 0.1, for all recipes; of runs without a recipe
KIND = {"mlflow.experimentKind": "custom_model_development"}  # the training view, not the GenAI one
FIRST_CONTACT_SECONDS = 5.0  # at the start of a flow: a wrong address should show at once
OUTBOX = "outbox.jsonl"

moved_artifacts.register()


class Tracker:
    """A connected store and the experiment of a recipe in it.

    A flow that version 0.1 began goes on in the experiment that all recipes shared.
    """

    def __init__(
        self,
        section: TrackingSection,
        *,
        patience: float = 0.0,
        storage: Storage,
        recipe: str | None = None,
        flow: str | None = None,
    ) -> None:
        self.uri = tracking_uri(section, storage)
        _silence()
        check_driver(self.uri)
        location = artifact_location(self.uri, storage)
        check_artifact_client(location)
        self.stack = ExitStack()
        place = self.stack.enter_context(credentials_in_environment(self.uri))
        self.connection = Connection(redact(self.uri), max_outage=section.max_outage, say=say)
        self.storage = storage
        name = section.experiment or recipe or EXPERIMENT
        earlier = flow if section.experiment is None else None
        try:
            self._first_contact(place, patience, lambda: self._enter(name, earlier, location))
        except BaseException as error:
            self.close()
            if isinstance(error, CasemateError) or not isinstance(error, Exception):
                raise
            remedy = f"cannot be used: {first_line(error)}"
            raise CasemateError(TRACKING, self.uri, remedy) from error
        self.registry = Registry(self.client, place, self.experiment_id)

    def _first_contact(self, place: str, patience: float, enter: Callable[[], None]) -> None:
        """Connect; a server that is away at the start is an error after `patience`."""
        deadline = time.monotonic() + max(patience, FIRST_CONTACT_SECONDS)
        while True:
            try:
                with sorted_errors(self.uri), default_store(place):
                    check_port(self.uri)  # MLflow itself tries a database for minutes
                    self.client = MlflowClient(place)
                return enter()
            except UnavailableError as error:
                if time.monotonic() > deadline:
                    what = "MLflow server" if is_server(self.uri) else "database"
                    remedy = f"does not answer ({error}); is the {what} up?"
                    raise CasemateError(TRACKING, self.uri, remedy) from error
                time.sleep(1)

    def close(self) -> None:
        """Take the credentials out of the environment."""
        self.stack.close()

    def flow_run(self, name: str, fingerprint: str, *, outbox: Path) -> StepRun:
        """The parent run of the flow of a recipe: same recipe and inputs, same run."""
        identity, extra = {FLOW_TAG: fingerprint, **self.owner}, {RECIPE_TAG: name}
        return self._open(name, identity, extra, outbox)

    def step_run(self, parent: StepRun, step: str, fingerprint: str, *, folder: Path) -> StepRun:
        """The child run of a step, continued if it was interrupted."""
        identity = {"mlflow.parentRunId": parent.run_id, STEP_TAG: step, PRINT_TAG: fingerprint}
        return self._open(step, identity, self.owner, folder / OUTBOX)

    def supersede(self, step: str, fingerprint: str) -> None:
        """Mark the runs of a step that will run again (`--force`)."""
        identity = {STEP_TAG: step, PRINT_TAG: fingerprint, **self.owner}

        def mark() -> None:
            shared = self.client.get_experiment_by_name(EXPERIMENT)
            places = {self.experiment_id, *([shared.experiment_id] if shared else [])}
            for run in self.client.search_runs(sorted(places), having(identity)):
                self.client.set_tag(run.info.run_id, SUPERSEDED_TAG, "true")

        self._wait_for(mark)

    def _open(
        self, name: str, identity: Mapping[str, str], extra: Mapping[str, str], place: Path
    ) -> StepRun:
        run_id = self._wait_for(
            lambda: find_or_create(
                self.client, self.experiment_id, name, identity=identity, extra=extra
            )
        )
        outbox = self._outbox(run_id, place)
        outbox.restore()
        return StepRun(run_id, outbox, runs_page=self._runs_page())

    def _runs_page(self) -> str | None:
        """Where a server shows the runs of the experiment, without a user's name."""
        if not is_server(self.uri):
            return None
        parts = urlsplit(self.uri)
        place = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")
        return f"{place}/#/experiments/{self.experiment_id}/runs"

    def _outbox(self, run_id: str, place: Path) -> Outbox:
        writer = RunWriter(self.client, self.registry, self.experiment_id, run_id)

        def deliver(message: Message) -> None:
            with sorted_errors(self.uri):
                writer.write(message)

        return Outbox(place, deliver, self.connection)

    def _wait_for(self, action: Callable[[], Any]) -> Any:
        def call() -> Any:
            with sorted_errors(self.uri):
                return action()

        return self.connection.wait_for(call)

    def _enter(self, name: str, flow: str | None, location: str | None) -> None:
        """Find or make the experiment; that of an earlier version if it has this flow."""
        is_shared = self.uri != default_uri(self.storage)
        self.owner = {STORAGE_TAG: storage_id(self.storage)} if is_shared else {}
        self.experiment_id = (flow and self._earlier(flow)) or self._experiment(name, location)

    def _earlier(self, flow: str) -> str | None:
        """The experiment of version 0.1, if this flow began there."""
        with sorted_errors(self.uri):
            found = self.client.get_experiment_by_name(EXPERIMENT)
            if found is None or found.lifecycle_stage != "active":
                return None
            began = having({FLOW_TAG: flow, **self.owner})
            runs = self.client.search_runs([found.experiment_id], began, max_results=1)
        return str(found.experiment_id) if runs else None

    def _experiment(self, name: str, location: str | None) -> str:
        """The experiment of this name; two flows may create it at the same time."""
        with sorted_errors(self.uri):
            found = self.client.get_experiment_by_name(name)
            if found is None:
                try:
                    return str(self.client.create_experiment(name, location, tags=KIND))
                except MlflowException as error:
                    if error.error_code != EXISTS:
                        raise
                found = self.client.get_experiment_by_name(name)
            if found is None or found.lifecycle_stage != "active":
                remedy = "was deleted in MLflow; restore it there or name another"
                raise CasemateError("tracking.experiment", name, remedy)
            for key, value in KIND.items():
                if key not in found.tags:  # a user may have chosen another view
                    self.client.set_experiment_tag(found.experiment_id, key, value)
            return str(found.experiment_id)


def _silence() -> None:
    """Schema migrations, export hints, stacks of errors that we tell in one line."""
    for name in ("mlflow", "alembic", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
