"""Submission without a cluster: the controller's order and retries, lost requests, variables."""

import os
import socket
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from ray.job_submission import JobStatus

from components.core.errors import CasemateError
from pipelines.flow.plan import stage_needs
from pipelines.recipe import load
from pipelines.runtime import flows, forwarding, job_client, jobs
from pipelines.runtime.flows import FLOW_KEY, REFUSED, STAGE_KEY, in_words, progress_of

NEEDS = {
    "prepare": set(),
    "train": {"prepare"},
    "attack": {"prepare", "train"},
    "certify": {"prepare", "train"},
    "report": {"prepare", "train", "attack", "certify"},
}
HOST = socket.gethostname()
END = {"ok": ("SUCCEEDED", 0), "refused": ("FAILED", REFUSED), "stopped": ("STOPPED", None)}


class Cluster:
    """Runs jobs by a script: how each attempt at a stage ends; `log` is what happened."""

    def __init__(self, **script: list[str | int]) -> None:
        self.script = defaultdict(lambda: ["ok"], script)
        self.jobs: dict[str, dict] = {}
        self.log: list[str] = []

    def submit_job(self, *, submission_id, metadata, **_):
        stage = metadata[STAGE_KEY]
        attempt = sum(job["stage"] == stage for job in self.jobs.values())
        how = self.script[stage][min(attempt, len(self.script[stage]) - 1)]
        end = END.get(how) or ("FAILED", how)
        self.jobs[submission_id] = {"stage": stage, "tags": metadata, "end": end, "left": 3}
        self.log.append(f"+{stage}")
        return submission_id

    def list_jobs(self):
        return [self.get_job_info(job_id, look=False) for job_id in self.jobs]

    def get_job_info(self, job_id, *, look=True):
        job = self.jobs[job_id]
        job["left"] -= look
        status, code = job["end"] if job["left"] <= 0 else ("RUNNING", None)
        if job["left"] == 0 and look:
            self.log.append(f"-{job['stage']}")
        return SimpleNamespace(
            submission_id=job_id, metadata=job["tags"], status=JobStatus(status), message="",
            start_time=0, driver_exit_code=code,
        )  # fmt: skip

    def get_job_logs(self, job_id):
        return f"log of {job_id}"


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(jobs, "PAUSE", 0)
    monkeypatch.setattr(jobs, "code_env", lambda *_, **__: {})


def control(cluster, *, parallel=False, needs=NEEDS):
    said: list[str] = []
    jobs.Controller(cluster, "demo-1", needs, parallel=parallel, say=said.append).run()
    return said


def test_stages_follow_each_other():
    cluster = Cluster()
    control(cluster)
    assert cluster.log == [f"{sign}{stage}" for stage in NEEDS for sign in "+-"]


def test_stages_that_do_not_need_each_other_run_side_by_side():
    cluster = Cluster()
    control(cluster, parallel=True)
    assert cluster.log[:4] == ["+prepare", "-prepare", "+train", "-train"]
    assert cluster.log[4:8] == ["+attack", "+certify", "-attack", "-certify"]
    assert cluster.log[8:] == ["+report", "-report"]


@pytest.mark.parametrize("code", [1, 2, -9, 127, None])
def test_a_crash_is_tried_again_whatever_its_code(code):
    cluster = Cluster(train=[code, code, "ok"])
    said = control(cluster)
    assert [job for job in cluster.jobs if "train" in job] == [
        f"demo-1-train-{n}" for n in (1, 2, 3)
    ]
    assert sum("trying again" in text for text in said) == 2


def test_three_crashes_end_the_flow():
    cluster = Cluster(train=[2])
    with pytest.raises(jobs.StageFailedError, match="stage train ended FAILED") as failure:
        control(cluster)
    assert not failure.value.refused
    assert cluster.log.count("+train") == jobs.MAX_TRIES
    assert "+attack" not in cluster.log


@pytest.mark.parametrize("how", ["refused", "stopped"])
def test_bad_input_and_stopped_stages_are_not_tried_again(how):
    cluster = Cluster(train=[how])
    with pytest.raises(jobs.StageFailedError) as failure:
        control(cluster)
    assert failure.value.refused == (how == "refused")
    assert cluster.log == ["+prepare", "-prepare", "+train", "-train"]


def test_after_a_failure_the_others_finish_and_no_stage_starts():
    cluster = Cluster(attack=["refused"])
    with pytest.raises(jobs.StageFailedError, match="attack"):
        control(cluster, parallel=True)
    assert cluster.log[-4:] == ["+attack", "+certify", "-attack", "-certify"]


def test_a_running_stage_is_joined():
    cluster = Cluster()
    tags = {FLOW_KEY: "demo-1", STAGE_KEY: "prepare"}
    cluster.submit_job(submission_id="demo-1-prepare-1", metadata=tags)
    control(cluster)
    assert cluster.log.count("+prepare") == 1


def test_needs_of_stages_come_from_the_plan():
    needs = stage_needs(load.load("demo"))
    assert list(needs) == ["prepare", "train", "tune", "attack", "evaluate", "certify", "report"]
    assert needs["train"] == needs["tune"] == {"prepare"}
    assert needs["attack"] == needs["evaluate"] == needs["certify"] == {"prepare", "train"}
    assert needs["report"] == needs.keys() - {"report"}


# -- variables


def test_forwarded_variables_arrive_and_ray_sees_their_names_alone(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "hunter2")
    recipe = load.parse({"name": "a", "data": {"source": "digits"}}, source="a.yaml")
    env = jobs.job_env(recipe, env=["MY_TOKEN"], flags=["--force"])
    assert env[forwarding.FORWARD_ENV] == "MY_TOKEN"
    assert "hunter2" not in str(env)
    folder = forwarding.packed({"MY_TOKEN": "hunter2"})
    monkeypatch.setenv("MY_TOKEN", "that of the node")
    monkeypatch.setenv(forwarding.FORWARD_ENV, "MY_TOKEN")
    with pytest.raises(CasemateError, match="package is not here"):
        forwarding.load()
    monkeypatch.syspath_prepend(folder.parent)
    forwarding.load()
    assert os.environ["MY_TOKEN"] == "hunter2"


def test_packages_of_equal_values_have_other_digests():
    first, second = (forwarding.packed({"A": "b"}) / forwarding.VALUES for _ in range(2))
    assert first.read_bytes() != second.read_bytes()
    assert first.parents[2].stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("NOT_SET_ANYWHERE", "is not set here"),
        ("MY_TOKEN=hunter2", "is not the name of a variable"),
        ("RAY_ADDRESS", "is set by casemate"),
        (forwarding.RECIPE_ENV, "is set by casemate"),
    ],
)
def test_other_names_are_refused_without_their_values(name, why):
    with pytest.raises(CasemateError, match=why) as error:
        forwarding.values_of([name], reserved={})
    assert "hunter2" not in str(error.value)


# -- whose disk


@pytest.mark.parametrize(
    ("names", "address", "here"),
    [
        ({HOST}, "http://127.0.0.1:8265", True),
        ({HOST}, "http://10.0.0.5:8265", True),  # its own address
        (set(), "http://localhost:8265", True),  # just started
        (set(), "http://10.0.0.5:8265", False),
        ({"ray-head-7f9"}, "http://127.0.0.1:8265", False),  # kubectl port-forward
        ({HOST, "node-2"}, "http://127.0.0.1:8265", False),
    ],
)
def test_paths_are_those_of_this_machine_if_it_is_the_whole_cluster(names, address, here):
    client = SimpleNamespace(hostnames=lambda: names)
    assert jobs.is_this_machine(client, address) is here


# -- a dashboard that comes and goes


class Dashboard(ThreadingHTTPServer):
    """Answers the version check; `faults` are what happens to the next requests."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Answer)
        self.faults: list[str] = []
        self.num_requests = 0
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.num_requests += 1
        fault = self.server.faults.pop(0) if self.server.faults else ""
        if fault == "drop":
            self.connection.close()
            return
        body = b"[]" if self.path == "/api/jobs/" else b'{"ray_version": "2.60.0"}'
        self.send_response(int(fault or 200))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def dashboard():
    server = Dashboard()
    yield server
    server.shutdown()
    server.server_close()


def test_lost_requests_are_repeated_and_told_once(dashboard):
    said: list[str] = []
    client = job_client.connect(dashboard.url, say=said.append)
    dashboard.faults = ["drop", "503", "drop"]
    assert client.list_jobs() == []
    assert said == [
        "no answer from the dashboard (ConnectionError); trying again",
        "the dashboard answers again",
    ]


def test_a_dashboard_that_stays_away_is_given_up(dashboard):
    client = job_client.PatientClient(dashboard.url, say=lambda _: None, patience=0.3)
    dashboard.shutdown()
    dashboard.server_close()
    with pytest.raises(job_client.ConnectionLostError, match="is not stopped by this"):
        client.list_jobs()


def test_an_error_of_the_dashboard_is_not_repeated(dashboard):
    client = job_client.connect(dashboard.url)
    dashboard.faults, dashboard.num_requests = ["500"], 0
    with pytest.raises(RuntimeError, match="500"):
        client.list_jobs()
    assert dashboard.num_requests == 1


# -- progress


LOG = """train.main        12.0 s     train.main-0ee668ef7c16
progress certify.l2: 10/1000 items, 1.00/s, eta 990 s, failures 0, workers 1/4, waiting 0 s
progress certify.patch: 7/7 items, 3.50/s, eta 0 s, failures 0, workers 4/4, waiting 0 s
progress certify.l2: 120/1000 items, 3.20/s, eta 275 s, failures 2, workers 3/4, waiting 0 s; x
progress certify.l2: 1"""


def test_the_last_progress_of_every_unfinished_step_is_shown():
    (found,) = progress_of(LOG)
    assert (found["done"], found["total"], found["failures"]) == (120, 1000, 2)
    assert in_words(found) == "certify.l2 120/1000 items, 3.2/s, 4 min 35 s left, 2 failures"
    assert progress_of("nothing\n") == []
    many = {**found, "done": 12_345_678, "total": 1e8, "rate": 1234.5}
    assert in_words(many).startswith("certify.l2 12345678/100000000 items, 1234.5/s")


def test_progress_before_anything_is_finished():
    line = "progress attack.linf: 0/24 items, ?/s, eta ? s, failures 0, workers 0/2, waiting 75 s"
    (found,) = progress_of(line)
    assert in_words(found) == (
        "attack.linf 0/24 items, 0 failures, waiting for workers for 1 min 15 s"
    )


def test_exit_codes_of_flows():
    def code(status: str, exit_code: int | None) -> int:
        return flows.FlowJob("f", "flow", "f-1", status, "", 0.0, exit_code).code

    assert code("SUCCEEDED", 0) == 0
    assert code("FAILED", REFUSED) == 2
    assert code("FAILED", 2) == code("FAILED", None) == code("STOPPED", None) == 1
