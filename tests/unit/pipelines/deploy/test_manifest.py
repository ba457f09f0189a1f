"""`casemate manifest`: complete files, equal to the reviewed ones, valid, and true to the recipe.

Renew the reviewed files with `CASEMATE_RENEW_SNAPSHOTS=1 pytest tests/unit/pipelines/deploy`.
"""

import json
import os
import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from pipelines import api
from pipelines.cli.main import app
from pipelines.deploy.settings import ManifestSettings
from pipelines.recipe.load import load, loads
from tests.unit.pipelines.deploy.files import ROOT, check, is_refused, misspelt

GOLDEN = Path(__file__).parent / "golden"
SHIPPED = {  # files that are part of the project
    "demo-rayjob": ROOT / "infra" / "k8s" / "base" / "rayjob.yaml",
    "demo-ray-up": ROOT / "infra" / "ray-up.yaml",
    "demo-skypilot": ROOT / "infra" / "skypilot.yaml",
}
RENEW = "renew with CASEMATE_RENEW_SNAPSHOTS=1 pytest tests/unit/pipelines/deploy, and review"
IMAGE = "casemate:0.1.0"
CLAIM = {"image": IMAGE, "claim": ["casemate:/runs"]}
BUCKET = {"image": IMAGE, "storage": "s3://team/runs"}
TRACKED = ["tracking.uri=http://mlflow.ml.svc:5000"]
GPUS = [
    *("data.path=/data/imagenet", "cluster.train_workers=8", "cluster.cpus_per_train_worker=8"),
    *("cluster.gpus_per_train_worker=1", "cluster.gpus_per_actor=0.5"),
]
SEARCH = ["data.path=/data/cifar10", "model.pretrained=/data/xcit-s12-eps8"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "demo-rayjob": ("demo", CLAIM),
    "demo-raycluster": ("demo", {**CLAIM, "kind": "raycluster"}),
    "demo-argo": ("demo", {**CLAIM, "kind": "argo", "namespace": "ml"}),
    "demo-ray-up": ("demo", {**BUCKET, "kind": "ray-up", "overrides": TRACKED}),
    "demo-skypilot": ("demo", {**BUCKET, "kind": "skypilot", "overrides": TRACKED}),
    "imagenet-rayjob": (
        "in1k-eps8-s12",
        {
            **{**BUCKET, "overrides": [*TRACKED, *GPUS], "spot": True, "secret": "casemate"},
            **{"claim": ["imagenet:/data"], "namespace": "ml", "deadline": 96, "retries": 4},
        },
    ),
    "imagenet-skypilot": (
        "in1k-eps8-s12",
        {
            **{**BUCKET, "overrides": [*TRACKED, *GPUS], "spot": True, "kind": "skypilot"},
            **{"node_gpus": 8, "env": ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]},
        },
    ),
    "imagenet-ray-up": (
        "in1k-eps8-s12",
        {**BUCKET, "overrides": [*TRACKED, *GPUS], "spot": True, "kind": "ray-up"},
    ),
    "search-rayjob": (
        "ft-cifar10-search",
        {
            **{**BUCKET, "overrides": [*SEARCH, "cluster.gpus_per_train_worker=1"]},
            **{"secret": "casemate", "env": ["MLFLOW_TRACKING_URI"], "claim": ["data:/data"]},
            **{"queue": "gpus", "max_workers": 6},
        },
    ),
}


def made(case: str) -> Any:
    recipe, options = CASES[case]
    return api.manifest(recipe, **options)


@pytest.fixture(scope="module")
def manifests() -> dict[str, Any]:
    return {case: made(case) for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_the_file_is_the_reviewed_one(case, manifests):
    path = SHIPPED.get(case, GOLDEN / f"{case}.yaml")
    if os.environ.get("CASEMATE_RENEW_SNAPSHOTS"):
        manifests[case].write(path)
    assert path.is_file(), f"no file for {case}: {RENEW}"
    assert manifests[case].text == path.read_text(), RENEW


def test_no_reviewed_file_outlives_its_case():
    assert {path.stem for path in GOLDEN.iterdir()} == CASES.keys() - SHIPPED.keys()


@pytest.mark.parametrize("case", CASES)
def test_the_file_is_valid(case, manifests):
    documents = list(yaml.safe_load_all(manifests[case].text))
    assert documents == manifests[case].documents
    for document in documents:
        check(document)


@pytest.mark.parametrize("case", CASES)
def test_every_misspelt_key_is_found(case, manifests):
    count = 0
    for document in manifests[case].documents:
        for path, changed in misspelt(document):
            assert is_refused(changed), f"{document.get('kind')}: {path}"
            count += 1
    assert count > 8


# What the file does ------------------------------------------------------------------------------


def job_of(manifest: Any) -> Any:
    return next(d for d in manifest.documents if d["kind"] in ("RayJob", "RayCluster"))["spec"]


def groups_of(manifest: Any) -> dict[str, Any]:
    spec = job_of(manifest)
    return {g["groupName"]: g for g in spec.get("rayClusterSpec", spec)["workerGroupSpecs"]}


def amounts(group: Any) -> dict[str, str]:
    return group["template"]["spec"]["containers"][0]["resources"]["limits"]


def run_options(entrypoint: str) -> dict[str, Any]:
    """The parameters of a `casemate run`, as the command line reads them."""
    program, command, *words = shlex.split(entrypoint)
    assert (program, command) == ("casemate", "run")
    return typer.main.get_command(app).commands["run"].make_context("run", words).params


@pytest.mark.parametrize("case", [case for case in CASES if case.endswith("rayjob")])
def test_the_entrypoint_runs_the_same_recipe(case, manifests):
    name, options = CASES[case]
    given = run_options(job_of(manifests[case])["entrypoint"])
    there = load(given["recipe"], overrides=given["set_"])
    here = load(name, overrides=options.get("overrides", ()))
    assert there.digest() == here.digest()
    assert there.cluster.num_actors is not None
    assert given["storage"] == options.get("storage", "/runs")


def test_work_with_gpus_and_without_gets_a_group_each(manifests):
    groups = groups_of(manifests["imagenet-rayjob"])
    assert amounts(groups["gpu"]) == {"cpu": "8", "memory": "32Gi", "nvidia.com/gpu": "1"}
    assert amounts(groups["cpu"]) == {"cpu": "4", "memory": "16Gi"}
    assert groups["gpu"]["maxReplicas"] == 8  # train workers, one on each
    assert "cluster.num_actors=16" in job_of(manifests["imagenet-rayjob"])["entrypoint"]


def test_only_workers_are_on_spot_machines(manifests):
    spec = job_of(manifests["imagenet-rayjob"])
    cluster = spec["rayClusterSpec"]
    for group in cluster["workerGroupSpecs"]:
        assert group["template"]["spec"]["nodeSelector"] == {"cloud.google.com/gke-spot": "true"}
    for pod in (cluster["headGroupSpec"]["template"], spec["submitterPodTemplate"]):
        assert not pod["spec"].keys() & {"nodeSelector", "tolerations"}


def test_secrets_are_named_and_never_written(manifests, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:hidden-word@mlflow:5000")
    text = made("search-rayjob").text
    assert "hidden-word" not in text
    container = yaml.safe_load(text.split("---\n")[1])["spec"]["rayClusterSpec"]["headGroupSpec"][
        "template"
    ]["spec"]["containers"][0]
    reference = {"secretKeyRef": {"name": "casemate", "key": "MLFLOW_TRACKING_URI"}}
    assert {"name": "MLFLOW_TRACKING_URI", "valueFrom": reference} in container["env"]
    assert "envFrom" not in container
    whole = groups_of(manifests["imagenet-rayjob"])["gpu"]["template"]["spec"]["containers"][0]
    assert whole["envFrom"] == [{"secretRef": {"name": "casemate"}}]


@pytest.mark.parametrize(("wait", "seconds"), [("0.2", 1), ("90.5", 91), ("1e12", 2**31 - 1)])
def test_any_wait_of_a_recipe_is_one_of_kubernetes(wait, seconds):
    spec = job_of(api.manifest("demo", overrides=[f"cluster.max_wait={wait}"], **CLAIM))
    assert spec["preRunningDeadlineSeconds"] == seconds


def test_a_queue_gets_a_cluster_of_a_fixed_size(manifests):
    spec = job_of(manifests["search-rayjob"])
    assert spec["suspend"] is True
    assert spec["rayClusterSpec"]["enableInTreeAutoscaling"] is False
    for group in spec["rayClusterSpec"]["workerGroupSpecs"]:
        assert group["replicas"] == group["minReplicas"] == group["maxReplicas"]


def test_nothing_of_the_cluster_runs_as_root_and_workers_hold_no_token(manifests):
    spec = job_of(manifests["demo-rayjob"])
    cluster = spec["rayClusterSpec"]
    workers = [group["template"]["spec"] for group in cluster["workerGroupSpecs"]]
    others = [cluster["headGroupSpec"]["template"]["spec"], spec["submitterPodTemplate"]["spec"]]
    for pod in (*workers, *others):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert all(pod["automountServiceAccountToken"] is False for pod in workers)


def test_the_network_is_closed_but_for_the_cluster_and_the_dashboard(manifests):
    for case in ("demo-rayjob", "demo-raycluster", "demo-argo"):
        (policy,) = (d for d in manifests[case].documents if d["kind"] == "NetworkPolicy")
        own, dashboard = policy["spec"]["ingress"]
        assert own == {"from": [{"podSelector": policy["spec"]["podSelector"]}]}
        assert dashboard["ports"] == [{"port": 8265, "protocol": "TCP"}]
    labels = groups_of(manifests["demo-rayjob"])["cpu"]["template"]["metadata"]["labels"]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()


@pytest.mark.parametrize("kind", ["rayjob", "raycluster", "argo"])
def test_commands_of_the_header_are_in_the_namespace(kind):
    def commands(**options: Any) -> list[str]:
        text = api.manifest("demo", kind=kind, **CLAIM, **options).text
        top = " ".join(line for line in text.splitlines() if line.startswith("#"))
        return re.findall(r"(?:kubectl|argo)(?: --\S+ \S+)? (?:[a-z]+-?)+", top)

    there = commands(namespace="ml")
    assert len(there) >= 2
    assert all(" --namespace ml " in command for command in there)
    assert [command.replace(" --namespace ml", "") for command in there] == commands()


def test_a_recipe_of_the_users_travels_in_the_file(tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("name: my_own_recipe\nextends: demo\ncluster: {address: '10.0.0.5:6379'}\n")
    made = api.manifest(str(mine), overrides=["seed=3"], smoke=True, **CLAIM)
    assert made.name == "my-own-recipe"
    stored = next(d for d in made.documents if d["kind"] == "ConfigMap")
    there = loads(stored["data"]["recipe.yaml"], source="there")
    here = load(str(mine), overrides=["seed=3"], smoke=True)
    assert there.digest() == here.digest()
    assert there.cluster.address is None
    assert there.storage.root == "/runs"
    spec = job_of(made)
    assert spec["entrypoint"] == "casemate run /etc/casemate/recipe.yaml"
    head = spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    (volume,) = (v for v in head["volumes"] if v["name"] == "recipe")
    assert volume["configMap"]["name"] == stored["metadata"]["name"]
    assert {"name": "recipe", "mountPath": "/etc/casemate"} in head["containers"][0]["volumeMounts"]
    for document in made.documents:
        check(document)


def test_values_that_a_shell_would_change_travel_in_the_file():
    made = api.manifest("demo", overrides=["tune.space={train.weight_decay: [0.1]}"], **CLAIM)
    assert job_of(made)["entrypoint"] == "casemate run /etc/casemate/recipe.yaml"


def test_a_file_for_skypilot_holds_the_recipe(tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("name: mine\nextends: demo\n")
    made = api.manifest(str(mine), kind="skypilot", overrides=TRACKED, **BUCKET)
    script = made.documents[0]["run"]
    text = script.partition("<<'END_OF_RECIPE'\n")[2].partition("END_OF_RECIPE")[0]
    assert loads(text, source="there").digest() == load(str(mine)).digest()
    assert '--address "$head:6379"' in script
    assert "auto" not in script.replace(text, "")


@pytest.mark.parametrize("name", ["a" * 90, "1-shot", "x__y", "a-" * 40])
def test_names_of_recipes_become_names_of_kubernetes(name):
    made = api.manifest({**load("demo").resolved(), "name": name}, **CLAIM)
    for document in made.documents:
        check(document)
    other = api.manifest({**load("demo").resolved(), "name": f"{name}b"}, **CLAIM)
    assert other.name != made.name


def test_every_setting_is_a_flag():
    flags = {p.name for p in typer.main.get_command(app).commands["manifest"].params}
    assert {field.name for field in fields(ManifestSettings)} <= flags


def test_the_command_writes_a_file_and_tells_about_it(tmp_path):
    out = tmp_path / "k8s" / "demo.yaml"
    words = ["manifest", "demo", "--image", IMAGE, "--claim", "casemate:/runs", "--out", str(out)]
    plain = CliRunner().invoke(app, words)
    assert (plain.exit_code, plain.stdout) == (0, f"rayjob demo: {out}\n")
    assert out.read_text() == SHIPPED["demo-rayjob"].read_text()
    told = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert told["file"] == str(out)
    assert told["documents"] == list(yaml.safe_load_all(out.read_text()))
    shown = CliRunner().invoke(app, words[:-2]).stdout
    assert shown == out.read_text()
