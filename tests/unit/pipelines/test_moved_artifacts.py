"""Where the artifacts of a copied, moved or shared store are looked for."""

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import mlflow
import pytest
from mlflow import MlflowClient
from mlflow.tracking._tracking_service.utils import _artifact_repos_cache

from pipelines.runtime.moved_artifacts import CopiedArtifactRepository
from pipelines.runtime.tracking_uri import FILES, place_now


@pytest.fixture
def stores(tmp_path):
    """Folders `first` and `second`, each with a database and artifacts; the second in `ä b`."""
    for folder in (tmp_path / "first", tmp_path / "ä b" / "second"):
        (folder / "mlartifacts").mkdir(parents=True)
        (folder / "mlflow.db").touch()
    return tmp_path / "first", tmp_path / "ä b" / "second"


def uri_of(storage: Path) -> str:
    return f"{(storage / 'mlartifacts').as_uri()}/run/artifacts"


def test_a_copy_is_found_beside_its_database_and_the_original_stays(stores):
    for original, copy in (stores, reversed(stores)):
        assert place_now(uri_of(original), f"sqlite:///{copy}/mlflow.db") == uri_of(copy)
        assert place_now(uri_of(original), f"sqlite:///{original}/mlflow.db") == uri_of(original)


def test_a_store_whose_original_is_gone_is_found(stores, tmp_path):
    _, copy = stores
    gone = uri_of(tmp_path / "gone")
    assert place_now(gone, f"sqlite:///{copy}/mlflow.db?timeout=5") == uri_of(copy)


def test_artifacts_that_were_put_elsewhere_on_purpose_stay_there(stores, tmp_path):
    first, _ = stores
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "mlartifacts").mkdir(parents=True)  # no database of its own
    assert place_now(uri_of(elsewhere), f"sqlite:///{first}/mlflow.db") == uri_of(elsewhere)
    (first / "mlartifacts").rmdir()
    assert place_now(uri_of(tmp_path / "gone"), f"sqlite:///{first}/mlflow.db") == uri_of(
        tmp_path / "gone"
    )


def test_a_second_name_of_the_same_folder_changes_nothing(stores, tmp_path):
    first, _ = stores
    link = tmp_path / "link"
    link.symlink_to(first)
    assert place_now(uri_of(link), f"sqlite:///{first}/mlflow.db") == uri_of(link)


@pytest.mark.parametrize(
    ("artifacts", "tracking"),
    [
        ("s3://bucket/mlartifacts/run", "sqlite:////x/mlflow.db"),
        ("mlflow-artifacts:/mlartifacts/run", "http://server"),
        ("file:///gone/mlartifacts/run", "http://server"),
        ("file:///gone/others/run", "sqlite:////x/mlflow.db"),
    ],
)
def test_other_places_are_those_of_mlflow(artifacts, tracking):
    assert place_now(artifacts, tracking) == artifacts


def test_the_package_hands_the_scheme_to_mlflow():
    found = next(iter(entry_points(group="mlflow.artifact_repository", name=FILES)), None)
    assert found, "the package was installed before it had this entry point: make setup"
    assert found.load() is CopiedArtifactRepository


def test_a_client_reads_and_writes_a_moved_store_there(tmp_path):
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    client = MlflowClient(f"sqlite:///{before}/mlflow.db")
    place = (before / "mlartifacts").as_uri()
    run = client.create_run(client.create_experiment("x", artifact_location=place))
    client.log_text(run.info.run_id, "kept", "a.txt")
    before.rename(after)
    _artifact_repos_cache.clear()  # MLflow keeps places by run as long as a process lives
    moved = MlflowClient(f"sqlite:///{after}/mlflow.db")
    assert Path(moved.download_artifacts(run.info.run_id, "a.txt")).read_text() == "kept"
    moved.log_text(run.info.run_id, "later", "b.txt")
    assert sorted(path.name for path in after.rglob("*.txt")) == ["a.txt", "b.txt"]
    assert not before.exists()
    mlflow.set_tracking_uri(f"sqlite:///{after}/mlflow.db")
    assert mlflow.artifacts.load_text(f"runs:/{run.info.run_id}/a.txt") == "kept"


def test_reading_runs_of_a_store_loads_the_entry_point_without_a_warning():
    # The entry point needs its whole module: MLflow loads it while MLflow itself is imported.
    program = "import pipelines.runtime.tracked_steps, mlflow"
    done = subprocess.run(
        [sys.executable, "-W", "error:Failure attempting:UserWarning", "-c", program],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
