"""Fixtures of the tests with servers and several nodes; skipped where they cannot be installed."""

import tempfile
from pathlib import Path

import pytest

from tests.cluster.servers import MlflowServer, Postgres, postgres_binaries, remove


@pytest.fixture(scope="session")
def postgres():
    """A Postgres for all tests with a server."""
    if postgres_binaries() is None:
        pytest.skip("no Postgres here: apt-get install postgresql")
    folder = Path(tempfile.mkdtemp(prefix="cm-pg-", dir="/tmp"))
    folder.chmod(0o755)
    server = Postgres(folder / "cluster")
    server.start()
    yield server
    server.stop()
    remove(folder)


@pytest.fixture(scope="session")
def mlflow_server(postgres, tmp_path_factory):
    """`mlflow server` on Postgres; a test that stops it starts it again."""
    server = MlflowServer(tmp_path_factory.mktemp("mlflow"), store=postgres.uri)
    server.start()
    yield server
    server.stop()
