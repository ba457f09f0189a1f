"""Registered versions of MLflow's model registry: found by reference or run, and described."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from components.core.errors import CasemateError, first_line
from components.core.secrets import redact
from pipelines.recipe.credentials import TRACKING
from pipelines.runtime.outbox import UnavailableError
from pipelines.runtime.tracking import FLOW_TAG  # noqa: F401 - before mlflow: silences it
from pipelines.runtime.tracking_uri import (
    SQLITE,
    check_driver,
    check_port,
    credentials_in_environment,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient

SCHEME = "models:/"
REFERENCE = re.compile(r"models:/([^/@]+)(?:@([^/@]+)|/([0-9]+))")


class Version(NamedTuple):
    """A version of a registered model; a model that no run has logged has no `run_id`."""

    name: str
    number: str
    run_id: str = ""

    def __str__(self) -> str:
        return f"{SCHEME}{self.name}/{self.number}"


def version_at(reference: str, uri: str) -> Version:
    """The version behind models:/NAME@ALIAS or models:/NAME/VERSION."""
    found = REFERENCE.fullmatch(reference)
    if found is None:
        remedy = "is not a registered model; write models:/NAME@ALIAS or models:/NAME/VERSION"
        raise CasemateError("model", reference, remedy)
    name, alias, number = found.groups()
    with _store(uri, reference) as client:
        if alias:
            version = client.get_model_version_by_alias(name, alias)
        else:
            version = client.get_model_version(name, number)
    return Version(version.name, str(version.version), version.run_id or "")


def version_of_run(run_id: str, uri: str) -> Version | None:
    """The version whose model a run has logged; None: it was not registered."""
    with _store(uri, f"run {run_id}") as client:
        found = client.search_model_versions(f"run_id = '{run_id}'")
    return Version(found[0].name, str(found[0].version), run_id) if found else None


def describe(version: Version, text: str, uri: str) -> None:
    """Set the description of a version."""
    with _store(uri, str(version)) as client:
        client.update_model_version(version.name, version.number, redact(text))


@contextmanager
def _store(uri: str, named: str) -> "Iterator[MlflowClient]":
    """A store that exists; what it does not have is one clear line."""
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    check_driver(uri)
    if uri.startswith(SQLITE) and not Path(uri.removeprefix(SQLITE)).is_file():
        raise CasemateError(TRACKING, uri, "does not exist")  # MLflow would make a new one
    try:
        check_port(uri)
        with credentials_in_environment(uri) as place:
            yield MlflowClient(place)
    except (MlflowException, UnavailableError) as error:
        remedy = f"cannot be found or changed in {redact(uri)} ({first_line(error)})"
        raise CasemateError("model", named, remedy) from error
