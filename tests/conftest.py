"""Fixtures of the whole suite: one Ray session, one finished flow, one way to call the CLI."""

import atexit
import os
import secrets
import shutil
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import settings

from tests import mlflow_stores
from tests.e2e.cli import WHOLE, Cli, write_recipe
from tests.object_store import rclone_root, s3_root, s3_server

__all__ = ["rclone_root", "s3_root", "s3_server"]  # fixtures that live elsewhere

# A busy machine is no failure: nothing here is timed.
settings.register_profile("casemate", deadline=None)
settings.load_profile("casemate")

# Before anything imports ray: a private, short place for its sockets, and quick polling.
RAY_HOME = Path(tempfile.mkdtemp(prefix="cm-"))
atexit.register(shutil.rmtree, RAY_HOME, ignore_errors=True)  # also where no test is selected
os.environ |= {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_worker_niceness": "0",  # the tests with Ray are the long ones: nothing goes before them
    "RAY_TMPDIR": str(RAY_HOME),
    "CASEMATE_USER_CODE": str(RAY_HOME / "user_code"),
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
for name in ("RAY_ADDRESS", "MLFLOW_TRACKING_URI"):  # of the user's own
    os.environ.pop(name, None)


KEPT = pytest.StashKey[bool]()


def pytest_runtest_setup(item):
    """Workers that earlier tests kept end before a test that has not asked for them."""
    asked, stash = getattr(item, "fixturenames", ()), item.session.stash
    if "kept_workers" in asked:
        stash[KEPT] = True
    elif "ray_session" in asked and stash.get(KEPT, False):
        from pipelines.runtime.shards import release_workers

        release_workers()
        stash[KEPT] = False


@pytest.fixture(scope="session", autouse=True)
def _remove_ray_home():
    yield
    shutil.rmtree(RAY_HOME, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def _close_browser():
    yield
    if browser := sys.modules.get("tests.e2e.browser"):
        browser.close_browser()


@pytest.fixture(autouse=True)
def _no_store_of_another_test():
    """`mlflow.set_tracking_uri` leaves its store in the environment, where flows would find it."""
    mlflow_stores.copy_tables()
    yield
    os.environ.pop("MLFLOW_TRACKING_URI", None)


@pytest.fixture(autouse=True, scope="session")
def _no_local_gpus():
    """Warnings are those of a machine without GPUs, wherever the tests run."""
    from pipelines.recipe import gpus

    gpus.DEVICES = Path(os.devnull)


@pytest.fixture(scope="session")
def ray_session():
    """One Ray for every test that needs one."""
    import ray

    from pipelines.recipe.schema.place import ClusterSection
    from pipelines.runtime.cluster import connect

    connect(ClusterSection(num_cpus=2, object_store_mb=256), address=None)
    # Ray Data would start its actors again for the next flow.
    with mock.patch("pipelines.flow.execute.end_idle_actors"):
        yield
    ray.shutdown()


@pytest.fixture
def kept_workers(ray_session):
    """Workers stay from one flow to the next, also to one of the next test that asks for this.

    They hold the CPUs: for tests that use Ray by flows only, which end workers where they must.
    """
    with mock.patch("pipelines.flow.execute.give_cpus_back"):
        yield


@pytest.fixture(scope="session")
def cli():
    return Cli()


@pytest.fixture(scope="session")
def finished_flow(tmp_path_factory, cli):
    """A whole small flow, run once through the command line; tests only read it."""
    root = tmp_path_factory.mktemp("flow")
    recipe = write_recipe(root / "tiny.yaml", WHOLE)
    result = cli("run", recipe, "--storage", root / "storage", "--json")
    assert result.code == 0, result.err
    return root / "storage"
