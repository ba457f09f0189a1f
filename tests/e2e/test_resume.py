"""Real SIGKILLs in the middle of training and of certification: nothing lost, nothing doubled."""

import json
from collections import Counter
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.e2e.cli import step_folder, tiny_recipe

pytestmark = pytest.mark.e2e
FILES = ("votes.parquet", "certificates.parquet", "certificate.json")


def epochs_done(storage: Path, step: str) -> int:
    """Epochs that rank 0 of a running training has finished."""
    for live in storage.glob(f"*/{step}-*/unfinished/live.json"):
        return len(json.loads(live.read_text())["rows"])
    return 0


def parts(storage: Path, step: str) -> dict[str, int]:
    """Finished vote parts and when they were written."""
    return {
        p.name: p.stat().st_mtime_ns for p in storage.glob(f"*/{step}-*/unfinished/votes/*.parquet")
    }


def test_kills_leave_the_same_certificates_and_the_same_runs(cli, tmp_path, finished_flow):
    storage = tmp_path / "kill ünd resume"  # a path with a space and an umlaut on the way
    command = ("run", tiny_recipe(tmp_path / "tiny.yaml"), "--storage", storage)

    cli.kill_when(lambda: epochs_done(storage, "train.main") >= 1, *command)
    assert not (step_folder(storage, "train.main") / "manifest.json").exists()
    client = MlflowClient(f"sqlite:///{storage}/mlflow.db")
    before = {r.info.run_id for r in _runs(client)}

    cli.kill_when(lambda: 3 <= len(parts(storage, "certify.l2")) < 150, *command)
    kept = parts(storage, "certify.l2")
    trained = step_folder(storage, "train.main") / "manifest.json"
    trained_at = trained.stat().st_mtime_ns

    result = cli(*command)
    assert result.code == 0, result.err
    assert trained.stat().st_mtime_ns == trained_at  # a finished step is not repeated
    assert kept
    attacks = ("attacks.parquet", "summary.json")
    for step, names in {
        "certify.patch": FILES,
        "certify.l2": FILES,
        "attack.linf": attacks,
    }.items():
        for name in names:
            resumed = (step_folder(storage, step) / name).read_bytes()
            assert resumed == (step_folder(finished_flow, step) / name).read_bytes(), (step, name)

    runs = _runs(client)
    assert before <= {r.info.run_id for r in runs}  # the first attempt's runs went on
    names = Counter(r.info.run_name for r in runs)
    assert set(names.values()) == {1}, names
    assert {r.info.status for r in runs} == {"FINISHED"}
    for run in runs:
        for key in run.data.metrics:
            steps = [m.step for m in client.get_metric_history(run.info.run_id, key)]
            assert len(steps) == len(set(steps)), (run.info.run_name, key, steps)


def _runs(client: MlflowClient):
    experiment = client.get_experiment_by_name("casemate")
    return client.search_runs([experiment.experiment_id])
