"""The compose file and the Helm values of the MLflow server: keys, variables, options, images.

`docker compose config` and `helm lint` need programs that are rarely there. Keys are compared with
those of the compose specification and of the chart that we use; options and variables of MLflow
with the installed MLflow.
"""

import ast
import configparser
import re
import subprocess

import click
import mlflow
import pytest
import yaml
from mlflow import environment_variables
from mlflow.cli import server as mlflow_server

from tests import compose
from tests.compose import FOLDER
from tests.e2e.cli import ROOT
from tests.unit.infra.misspelt import (
    COUNT,
    FLAG,
    TEXT,
    TEXTS,
    closed,
    matches,
    misspellings,
    problems,
)

EXAMPLE = compose.variables(FOLDER / ".env.example")
VALUES = yaml.safe_load((FOLDER / "values.yaml").read_text())
FILE = yaml.safe_load((FOLDER / "compose.yaml").read_text())

SECONDS = {"type": "string", "pattern": "^[0-9]+s$"}
CHECK = closed({"test": TEXTS, "interval": SECONDS, "timeout": SECONDS, "retries": COUNT})
MOUNT = {"type": "string", "pattern": r"^(postgres|s3|\./[a-z_.]+):/[a-z/_.]+(:ro)?$"}
PORT = {"type": "string", "pattern": r"^\$\{BIND_ADDRESS:-127\.0\.0\.1\}:(\d+):\1$"}
AFTER = {"enum": ["service_healthy", "service_completed_successfully"]}
S3_CLIENT = (
    "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY",
)  # fmt: skip
RUSTFS = ("ADDRESS", "VOLUMES", "CONSOLE_ENABLE", "REGION", "ACCESS_KEY", "SECRET_KEY")
OF_MLFLOW = (
    "MLFLOW_AUTH_CONFIG_PATH", "MLFLOW_AUTH_ADMIN_USERNAME", "MLFLOW_AUTH_ADMIN_PASSWORD",
    "MLFLOW_FLASK_SERVER_SECRET_KEY", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION",
    "MLFLOW_DISABLE_TELEMETRY",
)  # fmt: skip


def service(*environment: str, **keys):
    names = closed(dict.fromkeys(environment, TEXT))
    common = {"image": TEXT, "restart": {"enum": ["no", "unless-stopped"]}, "environment": names}
    return closed({**common, "volumes": {"type": "array", "items": MOUNT}, **keys})


PORTS = {"type": "array", "items": PORT, "minItems": 1}
COMPOSE = closed(
    {
        "name": TEXT,
        "services": closed(
            {
                "postgres": service(
                    "POSTGRES_USER", "POSTGRES_DB", "POSTGRES_PASSWORD", healthcheck=CHECK
                ),
                "s3": service(
                    *(f"RUSTFS_{name}" for name in RUSTFS), healthcheck=CHECK, ports=PORTS
                ),
                "buckets": service(
                    *S3_CLIENT,
                    command=TEXTS,
                    depends_on=closed({"s3": closed({"condition": AFTER})}),
                ),
                "mlflow": service(
                    *S3_CLIENT,
                    "PGPASSWORD",
                    *OF_MLFLOW,
                    healthcheck=CHECK,
                    ports=PORTS,
                    command=TEXTS,
                    depends_on=closed(
                        dict.fromkeys(("postgres", "buckets"), closed({"condition": AFTER}))
                    ),
                ),
            }
        ),
        "volumes": closed({name: {"type": "null"} for name in ("postgres", "s3")}),
    }
)

FROM_SECRET = closed({"secretKeyRef": closed({"name": {"const": "mlflow"}, "key": TEXT})})
VARIABLES = {
    "oneOf": [
        closed({"name": TEXT, "value": TEXT}),
        closed({"name": TEXT, "valueFrom": FROM_SECRET}),
    ]
}
CHART = closed(  # of the chart's values.yaml, what we set
    {
        "fullnameOverride": TEXT,
        "image": closed({"tag": TEXT}),
        "server": closed(
            {
                "value_options": closed(
                    {
                        "host": TEXT,
                        "port": COUNT,
                        "workers": COUNT,
                        "allowed_hosts": TEXT,
                        "app_name": TEXT,
                    }
                )
            }
        ),
        "mlflow": closed({"backendStoreUri": TEXT, "artifactsDestination": TEXT}),
        "env": {"type": "array", "items": VARIABLES},
        "extraVolumes": {
            "type": "array",
            "items": closed({"name": TEXT, "configMap": closed({"name": TEXT})}),
        },
        "extraVolumeMounts": {
            "type": "array",
            "items": closed({"name": TEXT, "mountPath": TEXT, "readOnly": FLAG}),
        },
        "podSecurityContext": closed(
            {
                "runAsNonRoot": FLAG,
                "runAsUser": COUNT,
                "fsGroup": COUNT,
                "seccompProfile": closed({"type": {"const": "RuntimeDefault"}}),
            }
        ),
        "networkPolicy": closed({"enabled": FLAG}),
        "resources": closed(
            {
                "requests": closed({"cpu": TEXT, "memory": TEXT}),
                "limits": closed({"memory": TEXT}),
            }
        ),
    }
)


def of_compose() -> dict[str, str]:
    return compose.services(EXAMPLE)["mlflow"]


def server_options(words: list[str]) -> dict:
    """What `mlflow server` understands of its arguments."""
    context = click.Context(mlflow_server)
    options, rest, _ = mlflow_server.make_parser(context).parse_args(list(words))
    assert rest == []
    return options


@pytest.mark.parametrize(("document", "schema"), [(FILE, COMPOSE), (VALUES, CHART)])
def test_a_misspelt_key_is_found(document, schema):
    assert problems(document, schema) == []
    for path, wrong in misspellings(document):
        assert not matches(wrong, schema), path


def test_the_server_understands_its_options():
    name, verb, *words = of_compose()["command"]
    assert (name, verb) == ("mlflow", "server")
    ours = server_options(words)
    chart = VALUES["server"]["value_options"]
    words = [f"--{key.replace('_', '-')}={value}" for key, value in chart.items()]
    theirs = server_options(words)
    assert {key: value for key, value in ours.items() if key in ("app_name", "workers")} == {
        key: theirs[key] for key in ("app_name", "workers")
    }
    assert ours["artifacts_destination"] == VALUES["mlflow"]["artifactsDestination"]
    assert ours["backend_store_uri"] == VALUES["mlflow"]["backendStoreUri"]
    with pytest.raises(click.NoSuchOption):
        server_options(["--allowed-host=x"])


def test_the_server_knows_its_variables_and_both_files_agree():
    chart = {entry["name"]: entry for entry in VALUES["env"]}
    assert set(chart) == set(of_compose()["environment"])
    for name in OF_MLFLOW:
        assert hasattr(environment_variables, name), name
    wanted = {
        entry["valueFrom"]["secretKeyRef"]["key"]
        for entry in chart.values()
        if "valueFrom" in entry
    }
    assert wanted <= set(EXAMPLE)  # the Secret is made of a copy of .env.example
    given = {name: e["value"] for name, e in chart.items() if "value" in e}
    ours = of_compose()["environment"]
    assert given == {name: ours[name] for name in given}


def test_accounts_are_in_the_same_database_and_no_password_is_written_down():
    config = configparser.ConfigParser()
    config.read(FOLDER / "basic_auth.ini")
    assert config["mlflow"]["database_uri"] == VALUES["mlflow"]["backendStoreUri"]
    assert "admin_password" not in config["mlflow"]
    assert not re.search(r"://\w+:[^@\s]*@", (FOLDER / "compose.yaml").read_text())
    for name in ("POSTGRES_PASSWORD", "AWS_SECRET_ACCESS_KEY", "MLFLOW_TRACKING_PASSWORD"):
        with pytest.raises(KeyError, match=rf"{name} is missing in \.env"):
            compose.services({k: v for k, v in EXAMPLE.items() if k != name})


def test_the_example_sets_all_variables_and_only_used_ones():
    text = (FOLDER / "compose.yaml").read_text()
    named = {found[0] for found in compose.VARIABLE.findall(text)}
    optional = {found[0] for found in compose.VARIABLE.findall(text) if found[1] == "-"}
    clients = {"AWS_ENDPOINT_URL", "MLFLOW_TRACKING_URI"}  # of flows, in the shell
    assert set(EXAMPLE) == (named - optional) | clients
    example = (FOLDER / ".env.example").read_text()
    assert all(f"#{name}=" in example for name in optional)


def test_env_files_with_passwords_stay_out_of_git():
    names = ["infra/mlflow/.env", "cluster.env"]
    ignored = subprocess.run(
        ["git", "check-ignore", "--no-index", *names, "infra/mlflow/.env.example"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if ignored.returncode == 128:
        pytest.skip("not a git checkout")
    assert ignored.stdout.split() == names


def test_images_are_pinned_and_mlflow_is_the_locked_one():
    images = {found["image"] for found in FILE["services"].values()}
    assert all(re.search(r":v?\d", image) for image in images)
    versions = {re.search(r"mlflow:v([\d.]+)-full", i)[1] for i in images if "mlflow" in i}
    assert versions == {mlflow.__version__}
    assert VALUES["image"]["tag"] == f"v{mlflow.__version__}-full"


def test_requests_to_the_servers_of_the_page_are_allowed():
    from mlflow.server.security_utils import is_allowed_host_header

    for words, names in (
        (of_compose()["command"], ("127.0.0.1:5000", "localhost:5000", "mlflow:5000")),
        ([VALUES["server"]["value_options"]["allowed_hosts"]], ("mlflow.casemate.svc:5000",)),
    ):
        (hosts,) = [w.removeprefix("--allowed-hosts=") for w in words if "localhost:" in w]
        for name in names:
            assert is_allowed_host_header(hosts.split(","), name), name
        assert not is_allowed_host_header(hosts.split(","), "elsewhere.example.com:5000")


def test_the_airflow_dag_reads_what_is_written_for_it():
    tree = ast.parse((ROOT / "infra" / "airflow_dag.py").read_text())
    called = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert {"create_custom_object", "get_custom_object"} <= called
    (text,) = (ROOT / "infra" / "k8s").rglob("rayjob.yaml")
    *_, job = yaml.safe_load_all(text.read_text())
    constants = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert {"ray.io", "v1", "rayjobs", "jobDeploymentStatus"} <= constants
    assert constants & set(job["spec"]) == {"activeDeadlineSeconds", "backoffLimit"}
