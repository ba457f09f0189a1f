"""Artifacts of an SQLite store that was copied or moved: found beside its database.

MLflow keeps the absolute place of every run's artifacts. An entry point of the package
(`mlflow.artifact_repository`) hands the scheme `file` to the class below, so that `mlflow ui` and
`MlflowClient` open a copied store, too; for all other places it is MLflow's own class.
"""

import os

import mlflow
from mlflow.store.artifact import artifact_repository_registry
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

from pipelines.runtime.tracking_uri import FILES, place_now

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
    known.register(FILES, CopiedArtifactRepository)
