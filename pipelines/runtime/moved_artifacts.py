"""Artifacts of an SQLite store that was copied or moved: found beside its database.

MLflow keeps the absolute place of every run's artifacts. An entry point of the package
(`mlflow.artifact_repository`) hands the scheme `file` to the class below, so that `mlflow ui` and
`MlflowClient` open a copied store, too; for all other places it is MLflow's own class.
"""

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

import mlflow
from mlflow.store.artifact import artifact_repository_registry
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

from pipelines.runtime.tracking_uri import ARTIFACTS, SQLITE

SCHEME = "file"
SERVER_ENV = "_MLFLOW_SERVER_FILE_STORE"  # how `mlflow ui` tells its own process the database


class CopiedArtifactRepository(LocalArtifactRepository):  # type: ignore[misc]  # MLflow: no types
    """A folder of artifacts, wherever the store is now."""

    def __init__(
        self, artifact_uri: str, tracking_uri: str | None = None, registry_uri: str | None = None
    ) -> None:
        uri = tracking_uri or os.environ.get(SERVER_ENV) or mlflow.get_tracking_uri()
        super().__init__(place_now(artifact_uri, str(uri)), tracking_uri, registry_uri)


def register() -> None:
    """Let this process find the artifacts of a copied store, also where no package is installed."""
    known = artifact_repository_registry._artifact_repository_registry
    known.register(SCHEME, CopiedArtifactRepository)


def place_now(artifact_uri: str, tracking_uri: str) -> str:
    """Where artifacts are now: beside the database, if it is a copy of the one they are named by.

    A copy has the folder `mlartifacts` beside its database. The place in the URI is then that of
    the original: it is gone, or has a database of its own. Other places are left alone.
    """
    before, found, below = artifact_uri.partition(f"/{ARTIFACTS}/")
    if not found or not before.startswith(f"{SCHEME}:") or not tracking_uri.startswith(SQLITE):
        return artifact_uri
    original = Path(unquote(urlsplit(before).path))
    here = Path(tracking_uri.removeprefix(SQLITE).partition("?")[0]).absolute().parent
    there = original / ARTIFACTS
    if not (here / ARTIFACTS).is_dir() or _same(here, original):
        return artifact_uri
    if there.is_dir() and not (original / "mlflow.db").is_file():
        return artifact_uri  # the database was made elsewhere on purpose
    return f"{(here / ARTIFACTS).as_uri()}/{below}"


def _same(one: Path, other: Path) -> bool:
    """Whether both are one folder, perhaps by two names."""
    return one == other or (other.is_dir() and one.samefile(other))
