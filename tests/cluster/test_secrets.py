"""Passwords and tokens planted wherever a user could put one; every output is searched for them."""

import os
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from ray.util.state import list_actors, list_runtime_envs, list_workers

from pipelines.runtime.job_client import connect
from tests.cluster.servers import PASSWORD, Proxy, remove
from tests.e2e.cli import TINY, Cli, write_recipe
from tests.e2e.heads import ray_head

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]
IN_URI = "uri-p4ssw0rd-9d1c"
IN_ENVIRONMENT = {
    "HF_TOKEN": "hf_planted0c7f",
    "AWS_SECRET_ACCESS_KEY": "aws/planted+5b2e/Secret",
    "AWS_SESSION_TOKEN": "aws-session-planted-77",
    "SERVICE_API_KEY": "key-planted-3a9f",
    "RAY_AUTH_TOKEN": "aa" * 31 + "5e",  # 64 characters, as Ray makes them
}
PLANTED = [IN_URI, PASSWORD, *IN_ENVIRONMENT.values()]
TUNE = {"space": {"train.learning_rate": [0.001, 0.003]}, "epochs": 1}


class Watch:
    """Arguments of all processes below one, looked at while it runs."""

    def __init__(self, pid: int) -> None:
        self.seen: set[str] = set()
        self.process = psutil.Process(pid)
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()

    def _look(self) -> None:
        with suppress(psutil.NoSuchProcess):
            while self.process.is_running():
                for child in self.process.children(recursive=True):
                    with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                        self.seen.add("\0".join(child.cmdline()))
                time.sleep(0.2)


def dump(postgres) -> str:
    """All that MLflow keeps in Postgres."""
    command = [postgres.binaries / "pg_dump", "-h", "127.0.0.1", "-p", postgres.port]
    env = {**os.environ, "PGPASSWORD": PASSWORD}
    arguments = [*map(str, command), "-U", "casemate", "mlflow"]
    return subprocess.run(arguments, env=env, capture_output=True, text=True, check=True).stdout


def files_with(folder: Path, secrets: list[str]) -> list[str]:
    """Names of files and folders that hold one of these texts, or are named by it."""
    found = []
    for path in folder.rglob("*"):
        with suppress(OSError):
            content = path.read_bytes() if path.is_file() else b""
            text = str(path.relative_to(folder)).encode() + b"\n" + content
            found += [f"{path}: {secret}" for secret in secrets if secret.encode() in text]
    return found


@pytest.fixture(scope="module")
def outputs(mlflow_server, postgres, tmp_path_factory):
    """A whole flow behind a server that asks for a password; killed once, then finished."""
    base = tmp_path_factory.mktemp("secrets")
    proxy = Proxy(mlflow_server.uri, login=f"alice:{IN_URI}")
    uri = f"http://alice:{IN_URI}@{proxy.address}"
    sections = {**TINY, "name": "planted", "tracking": {"uri": uri, "experiment": "planted"}}
    sections["train"] = {**TINY["train"], "epochs": 3}
    recipe = write_recipe(base / "planted.yaml", {**sections, "tune": TUNE})
    home, storage = Path(tempfile.mkdtemp(prefix="cm-s-", dir="/tmp")), base / "storage"
    env = {**IN_ENVIRONMENT, "RAY_TMPDIR": str(home)}
    said, seen = [], set()
    for arguments in (("train", recipe), ("run", recipe, "--json"), ("run", recipe, "--verbose")):
        process = Cli().start(*arguments, "--storage", storage, env=env)
        watch = Watch(process.pid)
        out, err = process.communicate(timeout=900)
        watch.thread.join()
        seen |= watch.seen
        said.append(out + err)
        assert process.returncode == 0, err
    wrong = uri.replace(IN_URI, f"{IN_URI}-wrong")
    refused = Cli()(
        "run", recipe, "--storage", base / "other", "--set", f"tracking.uri={wrong}", env=env
    )
    said.append(refused.out + refused.err)
    proxy.close()
    yield {
        "base": base, "home": home, "storage": storage, "said": said, "seen": seen,
        "refused": refused, "database": dump(postgres), "proxy": proxy,
    }  # fmt: skip
    remove(home)


def test_the_server_was_used_with_the_password(outputs):
    assert outputs["proxy"].num_requests["calls"] > 50
    assert outputs["proxy"].num_refused > 0  # of the wrong password only
    assert "planted" in outputs["database"]


def test_a_wrong_password_is_refused_in_one_line(outputs):
    refused = outputs["refused"]
    assert refused.code == 2
    (line,) = [line for line in refused.err.splitlines() if "refuses access" in line]
    assert "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD" in line


def test_no_file_of_the_storage_holds_one(outputs):
    assert files_with(outputs["storage"], PLANTED) == []
    assert len(list(outputs["storage"].rglob("manifest.json"))) >= 6


def test_mlflow_holds_none(outputs, mlflow_server):
    assert [secret for secret in PLANTED if secret in outputs["database"]] == []
    assert files_with(mlflow_server.folder, PLANTED) == []


def test_nothing_that_was_said_shows_one(outputs):
    for text in outputs["said"]:
        assert [secret for secret in PLANTED if secret in text] == []


def test_no_process_was_started_with_one(outputs):
    assert any("raylet" in arguments for arguments in outputs["seen"])
    shown = [arguments for arguments in outputs["seen"] if any(s in arguments for s in PLANTED)]
    assert shown == []


def test_no_log_of_ray_holds_one(outputs):
    assert list(outputs["home"].rglob("*.log"))
    assert files_with(outputs["home"], PLANTED) == []


SOURCE = '''
"""A data source that notes which value of a variable its processes see."""

import os
from pathlib import Path

import numpy as np

from components.data.sources.base import Entry

PLACE = Path({place!r})


class Source:
    classes = ("dark", "light")

    def entries(self):
        (PLACE / "driver").write_text(os.environ.get("SERVICE_API_KEY", ""))
        parts = ("train", "train", "val", "test")
        return [Entry(f"item-{{i:03d}}", i % 2, parts[i // 2 % 4], str(i)) for i in range(40)]

    def decode(self, entry):
        (PLACE / f"worker-{{os.getpid()}}").write_text(os.environ.get("SERVICE_API_KEY", ""))
        return np.full((8, 8, 1), 100 * entry.label + int(entry.locator), np.uint8)
'''


def test_a_password_on_the_command_line_is_not_recorded_with_the_job(tmp_path):
    """Ray records the command of every driver that joins a cluster."""
    recipe = write_recipe(tmp_path / "a.yaml", {"name": "joined", "data": TINY["data"]})
    uri = f"tracking.uri=http://alice:{IN_URI}@127.0.0.1:1"
    with ray_head() as head:
        at = ("--address", head.address, "--storage", tmp_path / "storage", "--set", uri)
        done = Cli()("run", recipe, *at)
        jobs = str(connect(head.dashboard).list_jobs())
    assert done.code == 2  # no such server
    assert IN_URI not in done.out + done.err
    assert "tracking.uri=http://" in jobs
    assert IN_URI not in jobs


def test_forwarded_variables_arrive_and_show_up_nowhere(tmp_path):
    """By `submit --env`: not in job details, logs, process arguments or lists of Ray."""
    place = tmp_path / "seen"
    place.mkdir()
    (tmp_path / "noting.py").write_text(SOURCE.format(place=str(place)))
    values = {"name": "forwarded", "data": {"source": "python:noting.py:Source"}}
    recipe = write_recipe(tmp_path / "forwarded.yaml", values)
    planted = [value for name, value in IN_ENVIRONMENT.items() if name != "RAY_AUTH_TOKEN"]
    names = [name for name in IN_ENVIRONMENT if name != "RAY_AUTH_TOKEN"]
    with ray_head() as head:
        watch = Watch(head.process.pid)
        options = [word for name in names for word in ("--env", name)]
        at = ("--address", head.dashboard, "--storage", tmp_path / "storage")
        env = {name: IN_ENVIRONMENT[name] for name in names}
        done = Cli()("submit", recipe, *at, "--wait", *options, env=env)
        assert done.code == 0, done.out + done.err
        shown = [str(connect(head.dashboard).list_jobs())]
        for listed in (list_actors, list_runtime_envs, list_workers):
            shown.append(str(listed(address=head.dashboard, detail=True)))
        unpacked = list(head.home.rglob("casemate_forwarded"))
        modes = {folder.stat().st_mode & 0o777 for folder in unpacked}
        logs = files_with(head.home / "session_latest" / "logs", planted)
    watch.thread.join()
    seen = {path.name.partition("-")[0]: path.read_text() for path in place.iterdir()}
    assert seen == dict.fromkeys(("driver", "worker"), IN_ENVIRONMENT["SERVICE_API_KEY"])
    assert "SERVICE_API_KEY" in shown[0]  # the name travels in the open
    assert any("stage-job prepare" in arguments.replace("\0", " ") for arguments in watch.seen)
    everything = [*shown, *watch.seen, done.out, done.err]
    assert [text for text in everything if any(secret in text for secret in planted)] == []
    assert logs == files_with(tmp_path / "storage", planted) == []
    assert modes == {0o700}  # others on the machine cannot read the values
