"""The doctor on real clusters with real faults: other disks, GPUs, code, silent nodes, servers."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.e2e.cli import ROOT, Cli, call, wait_until
from tests.e2e.heads import ray_head, ray_node

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
PATIENT = ("--timeout", 100)  # seconds: this machine may be busy

can_unshare = subprocess.run(["unshare", "--mount", "true"], check=False).returncode == 0
needs_unshare = pytest.mark.skipif(not can_unshare, reason="unshare --mount is not permitted here")


def findings(result, *, check: str, node: str = "") -> list[tuple[str, str]]:
    """(status, message) of one check, on one node."""
    return [
        (found["status"], found["message"])
        for found in result.json
        if found["check"] == check and found["message"].startswith(node)
    ]


def wait_for_nodes(head, count: int) -> None:
    """Wait until the cluster has so many nodes."""
    script = (
        "import pipelines, ray, sys; ray.init(address=sys.argv[1], logging_level='ERROR');"
        "print(sum(node['Alive'] for node in ray.nodes()))"
    )

    def num_nodes() -> int:
        done = subprocess.run(
            [sys.executable, "-c", script, head.address],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        return int(done.stdout.split()[-1]) if done.returncode == 0 else 0

    wait_until(lambda: num_nodes() == count, seconds=200)


@pytest.fixture
def installed(tmp_path) -> Cli:
    """The command line of an installed wheel: its code is not sent to clusters."""
    place = tmp_path / "wheel"
    for name in ("components", "pipelines"):
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("*.pyc"))
    return Cli(place)


def other_code(place: Path) -> Path:
    """The same code but for one line."""
    for name in ("components", "pipelines"):
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("*.pyc"))
    with (place / "pipelines/api/tables.py").open("a") as file:
        file.write("# another version\n")
    return place


@needs_unshare
def test_faults_of_machines_are_named(installed, tmp_path):
    storage = tmp_path / "storage"
    storage.mkdir()
    old = other_code(tmp_path / "old")
    hide = f"mount -t tmpfs none {storage}"
    freeze = f"mount --bind {storage} {storage} && mount -o remount,bind,ro {storage}"
    away = f"mount -t tmpfs none {installed.root}"
    with ExitStack() as up:
        head = up.enter_context(ray_head(options=["--node-name=head"]))
        nodes = {
            "own-disk": ray_node(head, options=["--node-name=own-disk"], before=hide),
            "read-only": ray_node(head, options=["--node-name=read-only"], before=freeze),
            "old": ray_node(
                head,
                options=["--node-name=old", "--num-gpus=2"],
                env={"PYTHONPATH": str(old)},
                before=away,
            ),
        }
        for node in nodes.values():
            up.enter_context(node)
        wait_for_nodes(head, 4)
        seen = installed(
            "doctor", *PATIENT, "--address", head.address, "--storage", storage, "--json"
        )
    assert seen.code == 1, seen.err
    ((status, message),) = findings(seen, check="storage", node="own-disk")
    assert (status, "is another folder" in message) == ("FAIL", True), message
    ((status, message),) = findings(seen, check="storage", node="read-only")
    assert (status, "cannot be written: Read-only" in message) == ("FAIL", True), message
    ((status, message),) = findings(seen, check="gpus", node="old")
    assert (status, "Ray has 2, torch sees 0" in message) == ("FAIL", True), message
    ((status, message),) = findings(seen, check="code", node="old")
    assert (status, f"in {old}" in message) == ("FAIL", True), message
    failed = [found for found in seen.json if found["status"] == "FAIL"]
    assert len(failed) == 4, failed
    assert [s for s, _ in findings(seen, check="storage", node="head")] == ["ok"]
    assert not list(storage.glob(".doctor-*"))


def test_a_silent_and_a_lost_node_are_named_in_bounded_time(cli, tmp_path):
    patient = {"RAY_health_check_failure_threshold": "1000"}  # Ray itself would wait for hours
    with (
        ray_head(options=["--node-name=head"], env=patient) as head,
        ray_node(head, options=["--node-name=silent"]) as silent,
    ):
        wait_for_nodes(head, 2)
        (raylet,) = [
            p for p in psutil.Process(silent.pid).children(recursive=True) if p.name() == "raylet"
        ]
        raylet.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        seen = cli("doctor", *PATIENT, "--address", head.address, "--storage", tmp_path, "--json")
        assert time.monotonic() - began < 260
        raylet.send_signal(signal.SIGCONT)
        assert seen.code == 1, seen.err
        ((status, message),) = findings(seen, check="node")
        assert (status, message.startswith("silent (")) == ("FAIL", True)
        assert "does not answer within" in message
        assert [s for s, _ in findings(seen, check="storage", node="head")] == ["ok"]

    with (
        ray_head(options=["--node-name=head"]) as head,
        ray_node(head, options=["--node-name=lost"]) as lost,
    ):
        wait_for_nodes(head, 2)
        for part in psutil.Process(lost.pid).children(recursive=True):
            part.kill()
        lost.kill()
        wait_for_nodes(head, 1)
        seen = cli("doctor", *PATIENT, "--address", head.address, "--storage", tmp_path, "--json")
        assert seen.code == 0, seen.out
        lost_ones = [m for s, m in findings(seen, check="cluster") if s == "warn"]
        assert len(lost_ones) == 1
        assert lost_ones[0].startswith("lost (")


def test_the_doctor_works_through_the_dashboard_alone(cli, tmp_path):
    with ray_head(options=["--node-name=head"]) as head:
        storage = tmp_path / "runs"
        seen = cli("doctor", *PATIENT, "--address", head.dashboard, "--storage", storage)
        assert seen.code == 0, seen.out + seen.err
        lines = seen.out.splitlines()
        assert all(line.startswith("ok ") for line in lines)
        assert any("code" in line and "as here" in line for line in lines)
        missing = {"name": "a", "data": {"source": "npz", "path": str(tmp_path / "none.npz")}}
        recipe = tmp_path / "a.yaml"
        recipe.write_text(str(missing))
        seen = cli(
            "doctor", recipe, *PATIENT, "--address", head.dashboard, "--storage", storage, "--json"
        )
        ((status, message),) = findings(seen, check="paths")
        assert (seen.code, status) == (1, "FAIL")
        assert "none.npz" in message


def test_servers_that_are_down_or_silent(tmp_path):
    """On this machine alone, with a Ray of its own."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        seen = Cli()("doctor", "--storage", tmp_path, "--json", env={"MLFLOW_TRACKING_URI": url})
    assert seen.code == 1
    ((status, message),) = findings(seen, check="mlflow")
    assert (status, "Connection refused" in message) == ("FAIL", True)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # connections are accepted and never answered
        url = f"http://user:hunter2@127.0.0.1:{silent.getsockname()[1]}"
        seen = Cli()("doctor", "--storage", tmp_path, "--json", env={"MLFLOW_TRACKING_URI": url})
    assert seen.code == 1
    ((status, message),) = findings(seen, check="mlflow")
    assert (status, "no answer within" in message) == ("FAIL", True)
    assert "hunter2" not in seen.out + seen.err


def test_bad_input_and_a_storage_that_cannot_be_written(tmp_path):
    assert call("doctor", "--address", "nowhere").code == 2
    assert call("doctor", "no-such-recipe").code == 2
    assert call("doctor", "--storage", "s3://bucket").code == 2
    blocked = tmp_path / "file"
    blocked.touch()
    seen = Cli()("doctor", "--storage", blocked / "runs", env=dict(os.environ))
    assert seen.code == 1
    assert "FAIL  storage" in seen.out
    assert "FAIL  mlflow" in seen.out
