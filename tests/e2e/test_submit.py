"""Real job submission to a real head on this machine: run, stop, resubmit, finish."""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.e2e.cli import TINY, step_folder, tiny_recipe, wait_until
from tests.e2e.own_things import write_things

pytestmark = pytest.mark.e2e


class Head(NamedTuple):
    """Where a cluster is reached: by drivers, and by job submission."""

    address: str
    dashboard: str


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def head():
    """`ray start --head` with a home of its own; ended at once with all its processes."""
    gcs, port = free_port(), free_port()
    home = tempfile.mkdtemp(prefix="cmh-")
    ray = Path(sys.executable).with_name("ray")
    process = subprocess.Popen(
        [ray, "start", "--head", "--block", "--num-cpus=2", f"--port={gcs}",
         f"--dashboard-port={port}", f"--temp-dir={home}", "--disable-usage-stats",
         f"--ray-client-server-port={free_port()}", "--object-store-memory=134217728",
         f"--dashboard-agent-listen-port={free_port()}"],  # 52365 may be another Ray's
        env={**os.environ, "RAY_TMPDIR": home},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        wait_until(lambda: answers(port))
        yield Head(f"127.0.0.1:{gcs}", f"http://127.0.0.1:{port}")
    finally:
        for part in psutil.Process(process.pid).children(recursive=True):  # it drains for 30 s
            part.kill()
        process.kill()
        process.wait(timeout=60)


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.timeout(420)
def test_stop_and_resubmit_finish_with_the_same_certificates(cli, tmp_path, head, finished_flow):
    dashboard = head.dashboard
    storage = tmp_path / "storage"
    certify = {"l2": TINY["certify"]["l2"]}
    train = {key: value for key, value in TINY["train"].items() if key != "variants"}
    recipe = tiny_recipe(tmp_path / "tiny.yaml", train=train, attack={}, certify=certify)
    submit = ("submit", recipe, "--address", dashboard, "--storage", storage)

    first = cli(*submit, "--json")
    assert first.code == 0, first.err
    flow = first.json["flow"]
    assert cli(*submit, "--json").json == first.json  # a running flow is not doubled

    wait_until(lambda: any(storage.glob("tiny/prepare-*/manifest.json")), seconds=120)
    stopped = cli("stop", flow, "--address", dashboard)
    assert stopped.code == 0, stopped.err
    states = {j["status"] for j in cli("status", flow, "--address", dashboard, "--json").json}
    assert states <= {"STOPPED", "SUCCEEDED"}
    assert not any(storage.glob("tiny/report-*/manifest.json"))

    second = cli(*submit, "--wait")
    logs = cli("logs", flow, "--address", dashboard)
    assert second.code == 0, second.out + second.err + logs.out
    assert "done before" in logs.out  # what the first attempt finished was kept
    for name in ("certificates.parquet", "votes.parquet", "certificate.json"):
        ours = step_folder(storage, "certify.l2") / name
        assert ours.read_bytes() == (step_folder(finished_flow, "certify.l2") / name).read_bytes()
    assert (step_folder(storage, "report") / "report.html").exists()
    stages = [j["stage"] for j in cli("status", flow, "--address", dashboard, "--json").json]
    assert {"flow", "prepare", "train", "certify", "report"} <= set(stages)

    unknown = cli("logs", "no-such-flow", "--address", dashboard)
    assert unknown.code == 2
    assert flow in unknown.err


def test_a_driver_joins_a_cluster_by_its_address(cli, tmp_path, head, finished_flow):
    recipe = tiny_recipe(tmp_path / "tiny.yaml")
    storage = tmp_path / "storage"
    said = cli("prepare", recipe, "--storage", storage, "--address", head.address)
    assert said.code == 0, said.err
    ours, theirs = (step_folder(root, "prepare") for root in (storage, finished_flow))
    for name in ("train-00000.parquet", "dataset.json"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()


@pytest.mark.timeout(420)
def test_code_of_the_users_own_travels_with_drivers_and_jobs(cli, tmp_path, head):
    recipe = write_things(tmp_path / "mine", train=None, attack={}, certify={})
    here = {"CASEMATE_USER_CODE": str(tmp_path / "cache")}  # which the cluster does not look into
    place = ("--storage", tmp_path / "driver", "--address", head.address)
    driver = cli("prepare", recipe, *place, env=here)
    assert driver.code == 0, driver.err
    place = ("--storage", tmp_path / "job", "--address", head.dashboard)
    job = cli("submit", recipe, *place, "--wait", env=here)
    assert job.code == 0, job.out + job.err
    for root in (tmp_path / "driver", tmp_path / "job"):
        assert (step_folder(root, "prepare") / "dataset.json").is_file()
