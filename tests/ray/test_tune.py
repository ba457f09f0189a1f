"""Ray Tune for real: a search that survives SIGKILL, and a population whose values change."""

import json
import zipfile
from pathlib import Path
from unittest import mock

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from mlflow import MlflowClient

from pipelines.flow import run as flow
from pipelines.recipe import load as recipe
from pipelines.stages.tune import results as tune_results
from tests.e2e.cli import TINY, step_folder, tiny_recipe

pytestmark = pytest.mark.ray

SMALL = {"train_items": 48, "attack": {"num_steps": 2, "num_items": 30}}
RATE, DECAY = "train.learning_rate", "train.weight_decay"
AXES = {RATE: {"kind": "loguniform", "low": 1e-4, "high": 1e-2}, DECAY: [0.01, 0.1, 0.5]}


def searches(storage) -> Path:
    return next(storage.glob("tiny/tune-*/unfinished/tune-*"), storage / "none yet")


def knows_a_checkpoint(storage) -> bool:
    """Whether the last snapshot of the search would let a trial go on."""
    snapshots = sorted(searches(storage).glob("snapshots/*.zip"))
    if not snapshots:
        return False
    with zipfile.ZipFile(snapshots[-1]) as archive:
        states = [name for name in archive.namelist() if name.startswith("experiment_state")]
        return any(b"checkpoint_00000" in archive.read(name) for name in states)


def leave_empty_files(storage) -> None:
    """What a kill can make of the files that Ray copies to the storage in place."""
    for path in searches(storage).iterdir():
        if path.suffix in (".json", ".pkl"):
            path.write_bytes(b"")


def epochs_done(storage) -> set[float]:
    """How long each epoch took that a checkpoint remembers: no epoch takes as long again."""
    folder = storage.glob("tiny/tune-*/unfinished/tune-*/*/checkpoint_*/state.pt")
    states = [torch.load(path, weights_only=True) for path in folder]
    return {row["seconds"] for state in states for row in state["history"]}


def trial_runs(storage) -> dict[str, list[float]]:
    """The MLflow runs of trials, and how long their epochs took."""
    client = MlflowClient(f"sqlite:///{storage}/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("tiny").experiment_id])
    stage = next(r for r in runs if r.info.run_name == "tune")
    children = [r for r in runs if r.data.tags.get("mlflow.parentRunId") == stage.info.run_id]
    assert all(r.info.status == "FINISHED" for r in children)
    found = {}
    for run in children:
        history = client.get_metric_history(run.info.run_id, "train/seconds")
        assert sorted(m.step for m in history) == list(range(len(history)))
        found[run.info.run_name] = [m.value for m in history]
    return found


@pytest.mark.timeout(600)
def test_a_killed_optuna_search_goes_on_and_its_winner_runs(ray_session, cli, tmp_path):
    search = {"space": AXES, "search": {"kind": "optuna", "num_trials": 3}, "epochs": 5}
    path = tiny_recipe(tmp_path / "tiny.yaml", tune=search | SMALL)
    storage = tmp_path / "storage"
    cli.kill_when(lambda: knows_a_checkpoint(storage), "tune", path, "--storage", storage)
    before = epochs_done(storage)
    leave_empty_files(storage)
    assert not list(storage.glob("tiny/tune-*/manifest.json"))

    flow.run_flow(recipe.load(str(path)), storage=storage, until="tune")
    folder = step_folder(storage, "tune")
    rows = json.loads((folder / "trials.json").read_text())["rows"]
    assert sorted(row["trial"] for row in rows) == [0, 1, 2]  # none doubled, none lost
    values = [row["values"] for row in rows]
    ended = [row for row in rows if row["status"] == "finished"]
    scores = [row["val_robust_accuracy"]["value"] for row in ended]
    assert ended == rows[: len(ended)]
    assert scores == sorted(scores, reverse=True)

    best = recipe.load(str(folder / "best.yaml"))
    assert (best.name, best.tune) == ("tiny-tuned", None)
    assert (best.train.learning_rate, best.train.weight_decay) == tuple(values[0].values())
    written = yaml.safe_load((folder / "best.yaml").read_text())
    assert written["train"]["epochs"] == TINY["train"]["epochs"]

    verdicts = pq.read_table(folder / "verdicts.parquet")
    assert verdicts.num_rows == rows[0]["val_robust_accuracy"]["num_items"] == 30
    standing = verdicts[f"trial_{rows[0]['trial']}"].to_pylist()
    assert sum(standing) / 30 == scores[0]
    logged = trial_runs(storage)
    lengths = {name: len(seconds) for name, seconds in logged.items()}
    assert lengths == {f"trial-{row['trial']}": row["epochs"] for row in rows}
    assert before & {seconds for run in logged.values() for seconds in run}  # not done again


@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_a_population_larger_than_the_machine_is_one_population(ray_session, tmp_path):
    """Four trials on two CPUs, two of one kind and two of another: the better kind takes over."""
    scheduler = {"kind": "pbt", "interval": 1, "quantile": 0.5, "resample_prob": 0}
    space = {RATE: [1e-8, 2e-8, 3e-3, 4e-3], DECAY: [0.1]}
    section = {"space": space, "scheduler": scheduler, "epochs": 2} | SMALL | {"train_items": 480}
    path = tiny_recipe(tmp_path / "tiny.yaml", tune=section)
    storage = tmp_path / "storage"
    with mock.patch.object(tune_results, "track", wraps=tune_results.track) as track:
        flow.run_flow(recipe.load(str(path)), storage=storage, until="tune")

    trials = track.call_args.args[1]
    assert sorted(trial.number for trial in trials) == [0, 1, 2, 3]
    assert all(trial.epochs == 2 and trial.finished for trial in trials)
    begun = {trial.number: trial.schedule[0]["values"][RATE] for trial in trials}
    assert len({rate < 1e-3 for rate in begun.values()}) == 1, begun  # all descend from one pair
    for trial in trials:
        epochs = [entry["epoch"] for entry in trial.schedule]
        assert epochs == sorted(set(epochs))
        assert epochs[0] == 0
        assert epochs[-1] < 2
        assert trial.schedule[-1]["values"] == trial.values

    folder = step_folder(storage, "tune")
    page = json.loads((folder / "pbt_schedule.json").read_text())
    assert page == {"trial": trials[0].number, "schedule": list(trials[0].schedule)}
    best = recipe.load(str(folder / "best.yaml"))
    assert best.train.learning_rate == trials[0].values[RATE]
    assert {name: len(epochs) for name, epochs in trial_runs(storage).items()} == {
        f"trial-{number}": 2 for number in range(4)
    }
