"""Flows on a real head in a bad week: crashes, lost connections, killed controllers, Ctrl-C."""

import re
import secrets
import signal
import sqlite3
import time
from contextlib import closing, suppress
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.e2e.cli import TINY, step_folder, tiny_recipe, wait_until, write_recipe
from tests.e2e.heads import free_port, ray_head

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

SOURCE = '''
"""A data source whose stage crashes, waits and tells what it sees, as files beside it say."""

import os
import sys
import time
from pathlib import Path

import numpy as np

from components.data.sources.base import Entry

PLACE = Path({place!r})
if sys.argv[1:] == ["stage-job", "prepare"]:
    (PLACE / "token").write_text(os.environ.get("MY_TOKEN", ""))
    if (PLACE / "crash").exists():
        (PLACE / "crash").unlink()
        os._exit(2)  # as a math library does that cannot be loaded
    done = 0
    while (PLACE / "wait").exists():
        done += 1
        line = "eta 275 s, failures 2, workers 3/4, waiting 0 s"
        print(f"progress prepare: {{done}}/1000000 items, 3.20/s, {{line}}", flush=True)
        time.sleep(0.5)


class Source:
    classes = ("dark", "light")

    def entries(self):
        parts = ("train", "train", "val", "test")
        return [Entry(f"item-{{i:03d}}", i % 2, parts[i // 2 % 4], str(i)) for i in range(40)]

    def decode(self, entry):
        return np.full((8, 8, 1), 100 * entry.label + int(entry.locator), np.uint8)
'''


@pytest.fixture(scope="module")
def head():
    with ray_head() as found:
        yield found


class Troubled:
    """A recipe with that source, and the command line with an address."""

    def __init__(self, cli, place: Path, head) -> None:
        self.cli, self.place, self.head = cli, place, head
        self.storage = place / "storage"
        (place / "troubled.py").write_text(SOURCE.format(place=str(place)))
        self.name = f"troubled-{secrets.token_hex(3)}"  # the head knows the flows of other tests
        values = {"name": self.name, "data": {"source": "python:troubled.py:Source"}}
        self.recipe = write_recipe(place / "troubled.yaml", values)
        self.submit = ("submit", self.recipe, "--storage", self.storage, *self.at)

    @property
    def at(self) -> tuple[str, str]:
        return ("--address", self.head.dashboard)

    def jobs(self, stage: str) -> list[dict]:
        found = self.cli("status", *self.at, "--json").json
        return [j for j in found if j["stage"] == stage and j["flow"].startswith(self.name)]


@pytest.fixture
def troubled(cli, tmp_path, head) -> Troubled:
    return Troubled(cli, tmp_path, head)


def test_a_crash_is_tried_again_and_variables_arrive(troubled):
    (troubled.place / "crash").touch()
    env = {"MY_TOKEN": "hunter2-and-more"}
    done = troubled.cli(*troubled.submit, "--wait", "--env", "MY_TOKEN", env=env)
    assert done.code == 0, done.out + done.err
    assert [(j["status"], j["exit_code"]) for j in troubled.jobs("prepare")] == [
        ("FAILED", 2),
        ("SUCCEEDED", 0),
    ]
    assert (troubled.place / "token").read_text() == "hunter2-and-more"
    flow = troubled.jobs("flow")[0]["flow"]
    shown = troubled.cli("status", *troubled.at, "--json").out
    shown += troubled.cli("logs", flow, *troubled.at).out + done.out + done.err
    assert "hunter2" not in shown
    assert "attempt 1 ended with code 2, trying again" in shown
    unset = troubled.cli(*troubled.submit, "--env", "NOT_SET_ANYWHERE")
    assert (unset.code, "is not set here" in unset.err) == (2, True)


def test_bad_input_is_not_tried_again_and_ends_with_2(cli, tmp_path, head):
    values = {"name": "refused", "data": {"source": "npz", "path": "/nowhere/at-all.npz"}}
    recipe = write_recipe(tmp_path / "refused.yaml", values)
    at = ("--address", head.dashboard)
    done = cli("submit", recipe, *at, "--storage", tmp_path / "storage", "--wait")
    assert done.code == 2, done.out + done.err
    assert "/nowhere/at-all.npz does not exist" in done.err
    found = cli("status", *at, "--json").json
    stages = [j["stage"] for j in found if j["flow"].startswith("refused")]
    assert stages == ["flow", "prepare"]
    relative = cli("submit", recipe, *at, "--set", "data.path=none.npz", "--storage", tmp_path)
    assert (relative.code, "data.path: none.npz does not exist" in relative.err) == (2, True)


@pytest.fixture
def _ctrl_c_is_heard():
    """A suite that runs in the background of a shell ignores it, and so would its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ctrl_c_is_heard")
def test_ctrl_c_a_killed_controller_and_a_second_submission(troubled):
    (troubled.place / "wait").touch()
    following = troubled.cli.start(*troubled.submit, "--wait")
    wait_until(lambda: "prepare " in following.stdout.readline(), seconds=200)
    following.send_signal(signal.SIGINT)
    _, err = following.communicate(timeout=60)
    assert following.returncode == 130, err
    flow = troubled.jobs("flow")[0]["flow"]
    assert f"{flow} goes on" in err

    logs = troubled.cli.start("logs", flow, *troubled.at, "-f")
    wait_until(lambda: bool(troubled.jobs("prepare")[-1]["progress"]), seconds=100)
    (progress,) = troubled.jobs("prepare")[-1]["progress"]
    assert progress["step"] == "prepare"
    assert (progress["total"], progress["rate"], progress["failures"]) == (1_000_000, 3.2, 2)
    shown = troubled.cli("status", flow, *troubled.at).out
    assert "/1000000 items, 3.2/s, 4 min 35 s left, 2 failures" in shown

    (controller,) = (
        p for p in troubled.head.processes("pipelines.cli control") if "python" in p.name()
    )
    controller.kill()
    wait_until(lambda: troubled.jobs("flow")[-1]["status"] == "FAILED", seconds=100)
    assert troubled.jobs("prepare")[-1]["status"] == "RUNNING"

    second = troubled.cli.start(*troubled.submit, "--wait")
    wait_until(lambda: len(troubled.jobs("flow")) == 2, seconds=100)
    wait_until(lambda: troubled.jobs("flow")[-1]["status"] == "RUNNING", seconds=100)
    (troubled.place / "wait").unlink()
    out, err = second.communicate(timeout=600)
    assert second.returncode == 0, out + err
    assert len(troubled.jobs("prepare")) == 1  # joined, not doubled
    text, _ = logs.communicate(timeout=100)
    assert logs.returncode == 0
    assert "progress prepare: 1/1000000 items" in text
    assert "report " in text.splitlines()[-1]


def test_a_dashboard_that_stands_still_is_waited_for(troubled):
    (troubled.place / "wait").touch()
    following = troubled.cli.start(*troubled.submit, "--wait")
    wait_until(lambda: "prepare " in following.stdout.readline(), seconds=200)
    dashboards = [
        p for p in troubled.head.processes("dashboard") if "dashboard.py" in " ".join(p.cmdline())
    ]
    assert dashboards
    for process in dashboards:
        process.send_signal(signal.SIGSTOP)
    time.sleep(40)  # longer than a request may take
    for process in dashboards:
        process.send_signal(signal.SIGCONT)
    (troubled.place / "wait").unlink()
    out, err = following.communicate(timeout=600)
    assert following.returncode == 0, out + err
    assert "no answer from the dashboard" in err
    assert "the dashboard answers again" in err
    flow = troubled.jobs("flow")[0]["flow"]
    controller = troubled.cli("logs", flow, *troubled.at, "--stage", "flow").out
    assert "no answer from the dashboard" in controller


class Observer:
    """What others see of a flow while it runs: the status of its MLflow run, Ray's metrics."""

    def __init__(self, storage: Path, metrics_port: int) -> None:
        self.database, self.port = storage / "mlflow.db", metrics_port
        self.statuses: list[str] = []
        self.gauges: set[str] = set()

    def until_end_of(self, flow) -> None:
        while flow.poll() is None:
            self._look_at_run()
            with suppress(OSError):
                url = f"http://127.0.0.1:{self.port}/metrics"
                text = urlopen(url, timeout=5).read().decode()
                self.gauges |= set(re.findall(r"^ray_(casemate_\w+)\{", text, re.MULTILINE))
            time.sleep(0.3)
        self._look_at_run()

    def _look_at_run(self) -> None:
        query = "SELECT status FROM runs WHERE name = 'tiny'"
        with suppress(sqlite3.OperationalError):  # not made yet
            with closing(sqlite3.connect(f"file:{self.database}?mode=ro", uri=True)) as database:
                found = [status for (status,) in database.execute(query)]
            self.statuses += [s for s in found if self.statuses[-1:] != [s]]


@pytest.fixture(scope="module")
def measured_head():
    """A head whose metrics can be scraped, and the port."""
    port = free_port()
    options = [f"--metrics-export-port={port}"]
    with ray_head(options=options, env={"RAY_metrics_report_interval_ms": "500"}) as found:
        yield found, port


def test_attacks_and_certificates_side_by_side_give_the_same_files(cli, tmp_path, measured_head):
    head, port = measured_head
    l2 = {key: value for key, value in TINY["certify"]["l2"].items() if key != "challenge"}
    recipe = tiny_recipe(
        tmp_path / "tiny.yaml",
        data={**TINY["data"], "limits": {"train": 200, "val": 40, "test": 24}},
        train={key: v for key, v in TINY["train"].items() if key != "variants"} | {"epochs": 1},
        attack={"linf": {"eps": 0.05, "attacks": [{"kind": "fgsm"}], "sanity": None}},
        certify={"l2": l2},
        report={},
    )
    lines = {}
    for flag in ("--parallel", "--force"):  # forced: one stage after the other
        where = ("--address", head.dashboard, "--storage", tmp_path / flag.strip("-"))
        flow = cli.start("submit", recipe, *where, flag, "--wait")
        observer = Observer(tmp_path / flag.strip("-"), port)
        observer.until_end_of(flow)
        out, err = flow.communicate(timeout=900)
        assert observer.statuses == ["RUNNING", "FINISHED"]  # not finished between its stages
        assert {"casemate_units_done", "casemate_unit_rate", "casemate_draws"} <= observer.gauges
        assert flow.returncode == 0, out + err
        lines[flag] = [line.split()[:2] for line in out.splitlines()]
    starts, ends = (
        [lines["--parallel"].index([stage, state]) for stage in ("attack", "certify")]
        for state in ("RUNNING", "SUCCEEDED")
    )
    assert max(starts) < min(ends)
    order = lines["--force"]
    assert order.index(["attack", "SUCCEEDED"]) < order.index(["certify", "RUNNING"])
    for step, name in (
        ("certify.l2", "votes.parquet"),
        ("certify.l2", "certificates.parquet"),
        ("attack.linf", "attacks.parquet"),
    ):
        ours, theirs = (
            (step_folder(tmp_path / flag, step) / name).read_bytes()
            for flag in ("parallel", "force")
        )
        assert ours == theirs, name
