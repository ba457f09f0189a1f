"""The section "One big machine" of infra/README.md, command by command.

The containers of the compose file are processes of this machine: Postgres of the system's
packages, moto in place of RustFS, `mlflow server` with the arguments and variables of the file.
"""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import obstore
import pytest
from mlflow import MlflowClient

from tests import compose
from tests.cluster.servers import Postgres, postgres_binaries, remove, wait_until
from tests.e2e.cli import ROOT
from tests.object_store import free_port, moto_command, serving
from tests.pages import fenced

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]
PAGE = ROOT / "infra" / "README.md"
COMPOSE = "docker compose --project-directory infra/mlflow up --detach --wait\n"


class Machine:
    """A checkout with the commands of the page, and the ports of its servers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.s3, self.mlflow, self.postgres = free_port(), free_port(), 0
        for name in ("Makefile", "pyproject.toml", "requirements.lock", ".venv", ".boot"):
            (folder / name).symlink_to(ROOT / name)
        shutil.copytree(ROOT / "infra", folder / "infra", ignore=shutil.ignore_patterns(".env"))

    @property
    def env_file(self) -> Path:
        return self.folder / "infra" / "mlflow" / ".env"

    def replace_passwords(self) -> None:
        """What the page asks for; and free ports, since 5000 and 9000 may be in use here."""
        lines = []
        for line in self.env_file.read_text().splitlines():
            name, _, value = line.partition("=")
            line = f"{name}={secrets.token_hex(16)}" if value.startswith("replace-me") else line
            line = line.replace("127.0.0.1:9000", f"127.0.0.1:{self.s3}")
            lines.append(line.replace("127.0.0.1:5000", f"127.0.0.1:{self.mlflow}"))
        self.env_file.write_text("\n".join(lines) + "\n")

    def shell(self, commands: str) -> str:
        """Standard output of commands, each of which must succeed."""
        own = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "MLFLOW_TRACKING"))}
        own["CASEMATE_CACHE"] = str(self.folder / "cache")
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", commands],
            cwd=self.folder, env=own, capture_output=True, text=True, timeout=3000, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        self.said = done.stdout + done.stderr
        return done.stdout

    def here(self, text: str) -> str:
        """Addresses between containers as those of this machine."""
        pairs = {
            "postgres:5432": f"127.0.0.1:{self.postgres}",
            "//s3:9000": f"//127.0.0.1:{self.s3}",
            "/etc/casemate/": f"{self.folder}/infra/mlflow/",
            "--host=0.0.0.0": "--host=127.0.0.1",
        }
        for there, here in pairs.items():
            text = text.replace(there, here)
        return text

    def process(self, service: dict) -> tuple[list[str], dict[str, str]]:
        """Command and environment of a service."""
        program, *arguments = [self.here(word) for word in service["command"]]
        variables = {name: self.here(value) for name, value in service["environment"].items()}
        return [str(Path(sys.executable).with_name(program)), *arguments], {
            **os.environ, **variables,
        }  # fmt: skip


@contextmanager
def containers(machine: Machine) -> Iterator[None]:
    """`docker compose up --wait`, and in the end `down`."""
    found = compose.services(compose.variables(machine.env_file))
    with ExitStack() as stack:
        database = found["postgres"]["environment"]
        folder = Path(tempfile.mkdtemp(prefix="cm-pg-", dir="/tmp"))
        folder.chmod(0o755)
        stack.callback(remove, folder)
        postgres = Postgres(
            folder / "cluster",
            user=database["POSTGRES_USER"],
            password=database["POSTGRES_PASSWORD"],
        )
        postgres.start()
        stack.callback(postgres.stop)
        machine.postgres = postgres.port
        accounts = machine.folder / "infra" / "mlflow" / "basic_auth.ini"
        accounts.write_text(machine.here(accounts.read_text()))
        stack.enter_context(serving(moto_command(machine.s3), machine.s3))
        command, env = machine.process(found["buckets"])
        for _ in range(2):  # a second start finds them
            subprocess.run(command, env=env, check=True)
        stack.enter_context(mlflow_server(machine, found["mlflow"]))
        yield


@contextmanager
def mlflow_server(machine: Machine, service: dict) -> Iterator[None]:
    """The server of the compose file, with its accounts."""
    command, env = machine.process(service)
    port, words = machine.mlflow, [word for word in command if not word.startswith("--port=")]
    with serving([*words, f"--port={port}"], port, env=env):
        wait_until(lambda: status(f"http://127.0.0.1:{port}/health") == 200, what="mlflow server")
        yield


def status(url: str, **headers: str) -> int:
    """The status of an answer; 0 without one."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """The machine after all commands of the section."""
    if postgres_binaries() is None:
        pytest.skip("no Postgres here: apt-get install postgresql")
    found = Machine(tmp_path_factory.mktemp("checkout"))
    (start,) = fenced(PAGE, "bash")[:1]
    (section,) = fenced(PAGE, "bash", section="One big machine")
    before, _, after = section.partition(COMPOSE)
    assert after, "the page starts the containers in another way"
    found.shell(start + before)
    found.replace_passwords()
    with containers(found):
        found.out = found.shell(start + after)
        yield found


@pytest.fixture
def client(machine, monkeypatch):
    """A client as on the page: addresses and passwords from .env."""
    for name, value in compose.variables(machine.env_file).items():
        monkeypatch.setenv(name, value)
    return MlflowClient(os.environ["MLFLOW_TRACKING_URI"])


def test_the_flow_is_on_the_server_and_in_the_bucket(machine, client):
    assert "demo" in machine.out.splitlines()[-1]
    assert "finished" in machine.out.splitlines()[-1]
    experiment = client.get_experiment_by_name("demo")
    runs = client.search_runs([experiment.experiment_id])
    assert {run.info.status for run in runs} == {"FINISHED"}
    steps = {run.data.tags.get("casemate.step") for run in runs}
    assert {"prepare", "attack.linf", "certify.patch", "certify.l2", "report"} <= steps
    names = {model.name for model in client.search_registered_models()}
    assert "demo-main" in names


def test_artifacts_go_through_the_server_into_its_bucket(machine, client, tmp_path):
    experiment = client.get_experiment_by_name("demo").experiment_id
    (run,) = client.search_runs([experiment], "tags.`casemate.step` = 'certify.l2'")
    assert run.info.artifact_uri.startswith("mlflow-artifacts:")
    fetched = Path(
        client.download_artifacts(run.info.run_id, "certificates.parquet", str(tmp_path))
    )
    kept = keys("mlflow")
    assert any(k.endswith(f"{run.info.run_id}/artifacts/certificates.parquet") for k in kept)
    assert all(key.startswith("artifacts/") for key in kept)
    (key,) = [k for k in keys("casemate") if "certify.l2-" in k and k.endswith(fetched.name)]
    assert bucket("casemate").get(key).bytes().to_bytes() == fetched.read_bytes()


def bucket(name: str):
    return obstore.store.from_url(f"s3://{name}", client_options={"allow_http": True})


def keys(name: str) -> list[str]:
    """All keys of a bucket."""
    return [entry["path"] for page in bucket(name).list() for entry in page]


def test_others_are_turned_away_and_passwords_are_not_shown(machine, client):
    runs = f"{client.tracking_uri}/api/2.0/mlflow/experiments/search?max_results=1"
    assert status(runs) == 401
    assert status(runs, Host="elsewhere.example.com:5000") == 403
    for name, value in compose.variables(machine.env_file).items():
        if "PASSWORD" in name or "SECRET" in name:
            assert value not in machine.said
