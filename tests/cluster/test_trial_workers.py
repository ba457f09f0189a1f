"""A trial on two workers of two nodes, one of which loses its power in the middle of an epoch."""

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import pytest
import ray
import torch
from mlflow import MlflowClient

from pipelines.flow.run import run_flow
from pipelines.recipe import load as recipe
from tests.e2e.cli import TINY, step_folder, tiny_recipe, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1500)]

SOON = {  # a dead node is noticed within seconds
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "5",
}
EPOCHS = 6


@contextmanager
def cluster_of(num_nodes: int) -> Iterator[tuple[Any, list[Any]]]:
    """A head that computes nothing, and nodes of one CPU each."""
    from ray.cluster_utils import Cluster

    small = {"object_store_memory": 128 * 2**20}
    head = {"num_cpus": 0, "include_dashboard": False, **small}
    with mock.patch.dict(os.environ, SOON):
        cluster = Cluster(initialize_head=True, head_node_args=head)
        nodes = [cluster.add_node(num_cpus=1, **small) for _ in range(num_nodes)]
        try:
            yield cluster, nodes
        finally:
            ray.shutdown()
            cluster.shutdown()


def small_recipe(path, **tune):
    section = {
        "space": {"train.weight_decay": [0.1]},
        "epochs": EPOCHS,
        "attack": {"num_steps": 2, "num_items": 20},
    }
    return tiny_recipe(
        path,
        train=TINY["train"] | {"variants": {}},
        tune=section | tune,
        attack={},
        certify={},
        cluster={"train_workers": 2, "feed_threads": 2},
    )


def search(path, storage, address: str) -> None:
    run_flow(recipe.load(str(path)), storage=storage, address=address, until="tune")


def epochs_saved(storage) -> list[float]:
    """How long each epoch of the newest checkpoint took: no epoch takes as long again."""
    saved = storage.glob("tiny/tune-*/unfinished/tune-*/*/checkpoint_*/state.pt")
    rows: list[list[float]] = [[]]
    for path in saved:
        with suppress(OSError, RuntimeError, EOFError):  # being written, or removed
            state = torch.load(path, weights_only=True)
            rows.append([row["seconds"] for row in state["history"]])
    return max(rows, key=len)


def epochs_logged(storage) -> list[float]:
    """How long the epochs of the only trial took, as MLflow has them."""
    client = MlflowClient(f"sqlite:///{storage}/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("tiny").experiment_id])
    (trial,) = [run for run in runs if run.info.run_name == "trial-0"]
    history = client.get_metric_history(trial.info.run_id, "train/seconds")
    assert [metric.step for metric in history] == list(range(EPOCHS))  # none twice
    return [metric.value for metric in history]


def busy_nodes() -> set[str]:
    free = ray._private.state.available_resources_per_node()
    return {node for node, left in free.items() if not left.get("CPU")}


def test_a_node_that_is_lost_costs_a_trial_at_most_an_epoch(tmp_path):
    path = small_recipe(tmp_path / "tiny.yaml")
    storage, failures = tmp_path / "storage", []

    def run() -> None:
        try:
            search(path, storage, cluster.address)
        except BaseException as error:
            failures.append(error)

    with cluster_of(3) as (cluster, nodes):
        running = threading.Thread(target=run)
        running.start()
        wait_until(lambda: failures or len(epochs_saved(storage)) >= 2, seconds=600)
        busy = busy_nodes() & {node.node_id for node in nodes}
        victim = next(node for node in nodes if node.node_id in busy)
        before = epochs_saved(storage)
        cluster.remove_node(victim, allow_graceful=False)  # SIGKILL
        running.join(timeout=900)
        assert not failures
        assert not running.is_alive()
        assert len(before) < EPOCHS, "it was over before the kill"
        search(path, tmp_path / "undisturbed", cluster.address)  # on the two nodes that are left
    found, expected = (step_folder(tmp_path / s, "tune") for s in ("storage", "undisturbed"))
    for name in ("trials.json", "verdicts.parquet", "best.yaml"):
        assert (found / name).read_bytes() == (expected / name).read_bytes(), name
    (row,) = json.loads((found / "trials.json").read_text())["rows"]
    assert (row["status"], row["epochs"]) == ("finished", EPOCHS)
    logged = epochs_logged(storage)
    # A checkpoint that is written may not be registered yet: then its epoch is the lost one.
    assert logged[: len(before) - 1] == before[:-1]


def test_trials_that_a_scheduler_stops_give_their_workers_back(tmp_path):
    """Three trials of two workers on two CPUs: each waits for the one before it."""
    space = {"train.learning_rate": [3e-3, 1e-8, 2e-8]}
    asha = {"kind": "asha", "grace_epochs": 4, "reduction_factor": 2}
    path = small_recipe(tmp_path / "tiny.yaml", space=space, scheduler=asha)
    with cluster_of(2) as (cluster, _):
        search(path, tmp_path, cluster.address)
    rows = json.loads((step_folder(tmp_path, "tune") / "trials.json").read_text())["rows"]
    found = [(row["values"]["train.learning_rate"], row["status"], row["epochs"]) for row in rows]
    assert found[0] == (3e-3, "finished", EPOCHS)
    assert sorted(found[1:]) == [(1e-8, "stopped early", 4), (2e-8, "stopped early", 4)]
