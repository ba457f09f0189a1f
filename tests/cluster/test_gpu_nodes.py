"""A head without CPUs and GPUs, and a node with a GPU of Ray's that torch cannot see.

In most tests a CPU stands in for it (`CASEMATE_TEST_GPU`): scheduling is real, and results must be
those of a CPU to the last byte.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import ray
from mlflow import MlflowClient

from components.core.digests import digest_file
from pipelines.flow.run import run_flow
from pipelines.recipe import load as recipe
from pipelines.runtime.devices import STAND_IN
from tests.e2e.cli import TINY, step_folder, tiny_recipe
from tests.e2e.heads import ray_head

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1500)]

IDLE = "GPU is here"  # in the line about GPUs that are not asked for
GPUS = {"gpus_per_train_worker": 1, "gpus_per_actor": 0.5}
TUNE = {
    "space": {"train.weight_decay": [0.1, 0.5]},
    "epochs": 2,
    "train_items": 48,
    "attack": {"num_steps": 2, "num_items": 20},
}
RESULTS = {
    "attack.linf": ("attacks.parquet", "summary.json"),
    "certify.patch": ("votes.parquet", "certificates.parquet"),
    "certify.l2": ("votes.parquet", "certificates.parquet"),
    "train.main": ("model/model.safetensors",),
    "tune": ("trials.json", "verdicts.parquet"),
}


@contextmanager
def cluster_with_a_gpu_node(**environ: str) -> Iterator[str]:
    """The address of a head that computes nothing, beside a node with two CPUs and one GPU."""
    from ray.cluster_utils import Cluster

    small = {"object_store_memory": 128 * 2**20}
    head = {"num_cpus": 0, "num_gpus": 0, "include_dashboard": False, **small}
    with mock.patch.dict(os.environ, environ):
        cluster = Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(num_cpus=2, num_gpus=1, **small)
        try:
            yield cluster.address
        finally:
            ray.shutdown()
            cluster.shutdown()


def small_recipe(path, **changes):
    train = TINY["train"] | {"epochs": 2}
    train["variants"] = {"columns": train["variants"]["columns"] | {"epochs": 2}}
    return tiny_recipe(path, train=train, tune=TUNE, **changes)


def test_every_stage_runs_on_the_node_and_gives_the_results_of_a_cpu(tmp_path, capfd):
    path = small_recipe(tmp_path / "tiny.yaml", cluster=GPUS)
    with cluster_with_a_gpu_node(**{STAND_IN: "cpu"}) as address:
        run_flow(recipe.load(str(path)), storage=tmp_path / "gpu", address=address)
        assert IDLE not in capfd.readouterr().err  # they are asked for
    path = small_recipe(tmp_path / "tiny.yaml", cluster={"num_cpus": 2})
    run_flow(recipe.load(str(path)), storage=tmp_path / "cpu")
    for step, files in RESULTS.items():
        for file in files:
            found = [step_folder(tmp_path / side, step) / file for side in ("gpu", "cpu")]
            assert digest_file(found[0]) == digest_file(found[1]), (step, file)
    client = MlflowClient(f"sqlite:///{tmp_path}/gpu/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("tiny").experiment_id])
    devices = {run.info.run_name: run.data.tags.get("casemate.device") for run in runs}
    assert {devices[step] for step in RESULTS if step != "tune"} == {"cpu"}


def test_a_gpu_that_torch_cannot_use_is_told_with_its_node(tmp_path):
    path = small_recipe(tmp_path / "tiny.yaml", cluster={"gpus_per_actor": 1})
    told = r"node [0-9.]+ \(.+\): Ray gave this worker GPU 0, but torch \S+ cannot use it"
    with cluster_with_a_gpu_node() as address:
        with pytest.raises(RuntimeError, match=told):
            run_flow(recipe.load(str(path)), storage=tmp_path, address=address)
        more = recipe.load(str(path), overrides=["cluster.gpus_per_train_worker=1", "seed=4"])
        with pytest.raises(RuntimeError, match=told) as caught:
            run_flow(more, storage=tmp_path, address=address, until="train")
        assert len(str(caught.value).splitlines()) == 1


def test_gpus_that_are_not_asked_for_are_told(tmp_path, capfd):
    path = tiny_recipe(tmp_path / "tiny.yaml", cluster={})
    with cluster_with_a_gpu_node() as address:
        run_flow(recipe.load(str(path)), storage=tmp_path, address=address, until="prepare")
        assert IDLE not in capfd.readouterr().err
        run_flow(recipe.load(str(path)), storage=tmp_path, address=address, until="train")
        (line,) = [line for line in capfd.readouterr().err.splitlines() if IDLE in line]
    assert line == (
        "cluster.gpus_per_train_worker: 0, but 1 GPU is here; training will run on CPUs: "
        "set it to 1"
    )


def test_lint_and_submit_count_the_gpus_of_a_cluster(tmp_path, cli):
    path = tiny_recipe(tmp_path / "tiny.yaml", cluster={})
    told = (
        "cluster.gpus_per_train_worker: 0, but 2 GPUs are here; training and attacks and "
        "certificates will run on CPUs: set it and cluster.gpus_per_actor to 1"
    )
    with ray_head(num_cpus=1, options=["--num-gpus=2"]) as head:
        dashboard = head.dashboard
        for address in (head.address, dashboard):
            linted = cli("lint", path, "--address", address)
            assert linted.code == 0, linted.err
            assert f"warning: {told}" in linted.out.splitlines()
        storage = tmp_path / "storage"
        sent = cli("submit", path, "--address", dashboard, "--storage", storage, "--json")
        assert sent.code == 0, sent.err
        assert [line for line in sent.err.splitlines() if line.endswith(told)]
        stopped = cli("stop", sent.json["flow"], "--address", dashboard)
        assert stopped.code == 0, stopped.err
    unreachable = cli("lint", path, "--address", "127.0.0.1:1")
    assert unreachable.code == 2
    assert unreachable.err.startswith("casemate: --address: 127.0.0.1:1 cannot be reached")
