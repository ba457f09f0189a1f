"""Clusters that grow, are scaled to zero, are busy, or have a broken node: all of it real."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.cluster.nodes import autoscaled, head, node
from tests.e2e.cli import ROOT, TINY, wait_until, write_recipe

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

CPU_NODE = {"resources": {"CPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": 2}


def start_work(address, folder, *words):
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-m", "tests.cluster.work", address, str(folder), *map(str, words)],
        cwd=ROOT, env=dict(os.environ), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def end(process, seconds=400):
    try:
        _, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, err


def done(folder: Path) -> Counter:
    return Counter(int(p.name.split("-")[0]) for p in folder.glob("[0-9]*-*"))


def nodes_used(folder: Path) -> set[str]:
    return {p.name.split("-")[1] for p in folder.glob("[0-9]*-*")}


def test_a_cluster_scaled_to_zero_is_asked_for_nodes_and_work_starts_with_the_first(tmp_path):
    with autoscaled({"cpu": CPU_NODE}, idle_timeout_minutes=5, max_workers=2) as cluster:
        code, err = end(start_work(cluster.address, tmp_path / "w", "--units=80", "--actors=2"))
    assert code == 0, err
    assert done(tmp_path / "w") == Counter(range(80))
    assert len(nodes_used(tmp_path / "w")) == 2  # grew to what was requested
    assert "no autoscaler" not in err  # what is told while it waits depends on how long that is


def test_workers_join_with_their_node(tmp_path):
    folder = tmp_path / "w"
    with head(num_cpus=1) as cluster:
        process = start_work(cluster.address, folder, "--units=300", "--seconds=0.2")
        wait_until(lambda: len(done(folder)) > 3)
        with node(cluster, num_cpus=1):
            code, err = end(process)
    assert code == 0, err
    assert done(folder) == Counter(range(300))
    assert len(nodes_used(folder)) == 2


def test_a_busy_cluster_is_told_and_waited_for(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    with head(num_cpus=1) as cluster:
        holder = start_work(cluster.address, first, "--units=60", "--seconds=0.5")
        wait_until(lambda: len(done(first)) > 0)
        code, err = end(start_work(cluster.address, second, "--units=2", "--max-wait=8"))
        assert code == 1
        last = err.strip().splitlines()[-1]
        assert "no worker was ready within cluster.max_wait (8 s)" in last
        assert "0 of 1 CPUs free" in last
        assert "start again to continue" in last
        assert not done(second)
        code, err = end(start_work(cluster.address, second, "--units=2"))  # waits for its turn
        assert code == 0, err
        assert "squares: waiting for 1 worker(s) since" in err
        assert end(holder)[0] == 0
    assert done(second) == Counter(range(2))


def test_a_cluster_that_never_has_such_a_node_says_so_at_once(tmp_path):
    with head(num_cpus=0) as cluster:
        code, err = end(start_work(cluster.address, tmp_path / "w", "--max-wait=20"))
    assert code == 1
    assert "no node of the cluster has that, one must join (it has no autoscaler)" in err
    assert "cluster.max_wait (20 s)" in err.strip().splitlines()[-1]


def test_a_broken_node_is_left_out_and_named(tmp_path):
    folder = tmp_path / "w"
    with head(num_cpus=1) as cluster, node(cluster, num_cpus=1):
        process = start_work(cluster.address, folder, "--units=400", "--seconds=0.2", "--actors=2")
        wait_until(lambda: len(nodes_used(folder)) == 2)
        broken = sorted(nodes_used(folder))[0]
        (folder / "broken").write_text(broken)
        code, err = end(process)
    assert code == 0, err
    assert done(folder) == Counter(range(400))  # none lost, none twice
    assert f"node {broken}" in err
    assert "is left out" in err
    assert len(list(folder.glob("failed-*"))) <= 8


def test_a_flow_waits_for_its_data_and_its_training_and_says_so(cli, tmp_path):
    """Ray Data, Ray Train and Ray Tune would wait in silence for CPUs that another job holds."""
    holding = tmp_path / "holding"
    with head(num_cpus=1) as cluster:
        parts = {key: TINY[key] for key in ("data", "model")}
        train = {key: v for key, v in TINY["train"].items() if key != "variants"} | {"epochs": 1}
        tune = {"space": {"train.learning_rate": [0.001, 0.003]}, "epochs": 1}
        place = {"address": cluster.address, "max_wait": 8}
        values = {"name": "tiny", **parts, "train": train, "tune": tune, "cluster": place}
        recipe = write_recipe(tmp_path / "tiny.yaml", values)
        options = ("--storage", tmp_path / "storage")
        for stage in ("prepare", "train", "tune"):
            holder = start_work(cluster.address, holding, "--units=2000", "--seconds=0.5")
            wait_until(lambda: len(done(holding)) > 0)
            failed = cli(stage, recipe, *options)
            assert failed.code == 1, failed.err
            last = failed.err.strip().splitlines()[-1]
            assert "no room within cluster.max_wait (8 s)" in last
            assert "0 of 1 CPUs free" in last
            waiting = cli.start(stage, recipe, *options, "--set", "cluster.max_wait=600")
            assert any(": waiting since" in line for line in waiting.stderr)  # as it comes
            holder.kill()
            _, err = waiting.communicate(timeout=400)
            assert waiting.returncode == 0, err
            for trace in holding.glob("*-*"):
                trace.unlink()
