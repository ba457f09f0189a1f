"""kill -9 of a raylet in the middle of train, tune, attack and certify: the same bytes, no zombies.

Two nodes besides a head without CPUs; the node that works is killed, and another one joins.
"""

import json
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.cluster.nodes import Node, head, node
from tests.e2e.cli import ROOT, TINY, step_folder, tiny_recipe, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

RECIPE = {
    "train": {**TINY["train"], "variants": {}, "epochs": 12},
    "tune": {
        "search": {"kind": "grid"},
        "scheduler": {"kind": "none"},  # ASHA decides in the order in which results come
        "space": {"train.learning_rate": [0.001, 0.003]},
        "train_items": 400,
        "attack": {"num_steps": 2, "num_items": 20},
    },
    "attack": {
        "linf": {
            "eps": 0.05,
            "attacks": [{"kind": "pgd", "num_steps": 40}, {"kind": "apgd-ce"}],
            "curves": {"eps": [0.01, 0.02, 0.05, 0.1], "steps": [1, 5, 40], "num_items": 24},
        }
    },
    "certify": {"l2": TINY["certify"]["l2"]},
}
COMPARED = {
    "train.main": ["model/model.safetensors"],
    "tune": ["best.yaml", "trials.json"],
    "attack.linf": ["attacks.parquet", "summary.json"],
    "certify.l2": ["votes.parquet", "certificates.parquet", "certificate.json", "challenge.json"],
}
BEGUN = {  # files that show that a stage is in the middle of its work
    "train.main": "train.main-*/unfinished/train-*/checkpoint_*",
    "tune": "tune-*/unfinished/tune-*/*/checkpoint_*",
    "attack.linf": "attack.linf-*/unfinished/parts/*/*.arrow",
    "certify.l2": "certify.l2-*/unfinished/votes/*/*.arrow",
}


def start(recipe: Path, storage: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pipelines.cli", "run", str(recipe), "--storage", str(storage),
         *words],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def works(part: Node) -> bool:
    return any(
        name.startswith("ray::") and "IDLE" not in name and "Controller" not in name
        for process in part.children("ray::")
        for name in process.cmdline()[:1]
    )


def has_progressed(storage: Path, since: float) -> bool:
    """Whether the stage has written a result since then."""
    for path in storage.glob("tiny/*/**/*"):
        if (
            path.suffix in (".parquet", ".arrow", ".pt", ".safetensors")
            and path.stat().st_mtime > since
        ):
            return True
    return False


def test_lost_nodes_change_no_byte_and_leave_no_run_open(tmp_path):
    recipe = tiny_recipe(tmp_path / "tiny.yaml", **RECIPE)
    calm = start(recipe, tmp_path / "calm")
    out, _ = calm.communicate(timeout=600)
    assert calm.returncode == 0, out
    storage, stalls = tmp_path / "killed", {}
    with ExitStack() as stack:
        cluster = stack.enter_context(head())
        nodes = [stack.enter_context(node(cluster)) for _ in range(2)]
        process = start(recipe, storage, "--address", cluster.address)
        for step, pattern in BEGUN.items():
            pattern = f"tiny/{pattern}"
            wait_until(
                lambda p=pattern: any(storage.glob(p)) or process.poll() is not None, seconds=400
            )
            assert process.poll() is None, process.communicate()[0]
            lost = next((part for part in nodes if works(part)), nodes[0])
            lost.kill_raylet()
            killed = time.time()
            nodes.remove(lost)
            nodes.append(stack.enter_context(node(cluster)))
            wait_until(lambda since=killed: has_progressed(storage, since + 0.5), seconds=300)
            stalls[step] = round(time.time() - killed)
        out, _ = process.communicate(timeout=900)
        assert process.returncode == 0, out
    sys.stderr.write(f"\nseconds from a kill to the next result: {stalls}\n")
    for step, names in COMPARED.items():
        for name in names:
            ours, theirs = (step_folder(tmp_path / p, step) / name for p in ("killed", "calm"))
            assert _bytes(ours) == _bytes(theirs), f"{step}/{name}"
    client = MlflowClient(f"sqlite:///{storage}/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("tiny").experiment_id])
    assert {run.info.status for run in runs} == {"FINISHED"}
    for run in runs:  # no metric has a step twice
        for key in run.data.metrics:
            steps = [point.step for point in client.get_metric_history(run.info.run_id, key)]
            assert len(steps) == len(set(steps)), key


def _bytes(path: Path) -> bytes:
    """Without the identifiers of MLflow runs."""
    if path.suffix != ".json":
        return path.read_bytes()
    return json.dumps(_without_runs(json.loads(path.read_text()))).encode()


def _without_runs(value):
    if isinstance(value, dict):
        return {k: _without_runs(v) for k, v in value.items() if k != "mlflow_run_id"}
    return [_without_runs(v) for v in value] if isinstance(value, list) else value
