"""Real SIGKILLs in the middle of training and of certification: nothing lost, nothing doubled."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from mlflow import MlflowClient

from tests.e2e.cli import WHOLE, call, step_folder

pytestmark = pytest.mark.e2e
FILES = ("votes.parquet", "certificates.parquet", "certificate.json")


def epochs_done(storage: Path, step: str) -> int:
    """Epochs that rank 0 of a running training has finished."""
    for live in storage.glob(f"*/{step}-*/unfinished/live.json"):
        return len(json.loads(live.read_text())["rows"])
    return 0


def parts(storage: Path, step: str) -> dict[str, int]:
    """Objects with finished votes and when they were written."""
    found = storage.glob(f"*/{step}-*/unfinished/votes/*/*.arrow")
    return {path.name: path.stat().st_mtime_ns for path in found}


@pytest.fixture(scope="module")
def killed_flow(cli, tmp_path_factory, finished_flow):
    """The flow of `finished_flow` after three kills, by one worker at first and then by two.

    The driver dies in training and between draws that stop early, an actor dies between draws whose
    number is fixed.
    """
    storage = tmp_path_factory.mktemp("kill ünd resume") / "my runs"  # spaces and an umlaut
    command = ("run", finished_flow.parent / "tiny.yaml", "--storage", storage)
    for step in ("prepare", "train.columns", "train.cleaner"):  # one training is enough to kill
        trained = step_folder(finished_flow, step)
        shutil.copytree(trained, storage / "tiny" / trained.name)

    cli.kill_when(lambda: epochs_done(storage, "train.main") >= 1, *command)
    assert not (step_folder(storage, "train.main") / "manifest.json").exists()
    client = MlflowClient(f"sqlite:///{storage}/mlflow.db")
    before = {r.info.run_id for r in _runs(client)}

    alone = (*command, "--set", "cluster.num_actors=1")
    cli.kill_when(lambda: len(parts(storage, "certify.early")) >= 3, *alone)
    kept = parts(storage, "certify.early")
    trained_at = finished_at(storage, "train.main")
    assert trained_at
    assert kept
    assert not finished_at(storage, "certify.early")

    result = cli.kill_worker_when(lambda: len(parts(storage, "certify.denoised")) >= 3, *command)
    assert result.code == 0, result.err
    assert finished_at(storage, "train.main") == trained_at  # a finished step is not repeated
    assert before <= {r.info.run_id for r in _runs(client)}  # the first attempt's runs went on
    return storage


def finished_at(storage: Path, step: str) -> int | None:
    manifest = step_folder(storage, step) / "manifest.json"
    return manifest.stat().st_mtime_ns if manifest.exists() else None


@pytest.mark.parametrize("step", ["patch", "l2", "early", "denoised"])
def test_kills_leave_the_same_certificates(killed_flow, finished_flow, step):
    ours, theirs = (step_folder(root, f"certify.{step}") for root in (killed_flow, finished_flow))
    for name in FILES:
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()


def test_kills_leave_the_same_attacks(killed_flow, finished_flow):
    ours, theirs = (step_folder(root, "attack.linf") for root in (killed_flow, finished_flow))
    for name in ("attacks.parquet", "summary.json"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()


def test_kills_leave_the_same_runs(killed_flow):
    client = MlflowClient(f"sqlite:///{killed_flow}/mlflow.db")
    runs = _runs(client)
    names = Counter(r.info.run_name for r in runs)
    assert set(names.values()) == {1}, names
    assert {r.info.status for r in runs} == {"FINISHED"}
    for run in runs:
        for key in run.data.metrics:
            steps = [m.step for m in client.get_metric_history(run.info.run_id, key)]
            assert len(steps) == len(set(steps)), (run.info.run_name, key, steps)


@pytest.mark.parametrize("step", ["early", "denoised"])
def test_what_is_left_verifies_and_is_voted_again_behind_the_denoiser(killed_flow, step, tmp_path):
    folder = step_folder(killed_flow, f"certify.{step}")
    claims = pq.read_table(folder / "certificates.parquet").to_pylist()
    micro_batch = WHOLE["certify"][step]["micro_batch"]
    assert any(row["n"] > 4 * micro_batch and row["correct"] for row in claims)  # several blocks
    assert len({row["prediction"] for row in claims}) > 3
    assert call("verify", folder).code == 0
    cleaner = step_folder(killed_flow, "train.cleaner") / "model"
    again = call("verify", folder, "--denoiser", cleaner, "--resample", 3)
    assert (again.code, "votes of 3 items repeated" in again.out) == (0, True), again.out
    other = step_folder(killed_flow, "train.main") / "model"
    assert call("verify", folder, "--denoiser", other, "--resample", 3).code == 2

    out = tmp_path / "again"
    narrower = call("recertify", folder, "--radii", "0.05", "--out", out, "--json")
    assert narrower.code == 0, narrower.err
    assert call("verify", out).code == 0
    table = tmp_path / "radii.tsv"
    assert call("export-tsv", folder, "--out", table, "--json").json["num_items"] == len(claims)


def _runs(client: MlflowClient):
    experiment = client.get_experiment_by_name("tiny")
    return client.search_runs([experiment.experiment_id])
