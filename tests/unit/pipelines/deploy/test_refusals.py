"""Bad input of `casemate manifest`: one line that names the flag or key, and the remedy."""

from typing import Any

import pytest

from pipelines import api
from tests.refusals import refusal_of

GOOD = {"image": "casemate:0.1.0", "claim": ["runs:/runs"]}
BUCKET = {"image": "casemate:0.1.0", "storage": "s3://team/runs"}
TRACKED = ["tracking.uri=http://mlflow:5000"]


def refused(recipe: Any = "demo", **options: Any) -> str:
    return refusal_of(api.manifest, recipe, **options)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"claim": ["runs:/runs"]}, "--image: is needed"),
        ({"image": "user:word@registry/x:1"}, "--image: "),
        ({"image": "Casemate:0.1.0"}, "--image: Casemate:0.1.0 is not an image"),
        ({**GOOD, "kind": "helm"}, "--kind: helm is unknown; choose one of rayjob"),
        ({"image": "casemate"}, "storage.root: runs is relative; add --claim NAME:PATH and set"),
        ({"image": "casemate", "kind": "skypilot"}, "runs is relative; set --storage to s3://"),
        ({"image": "casemate", "storage": "runs"}, "storage.root: runs is relative"),
        ({"image": "casemate", "storage": "/runs"}, "own disk; add --claim NAME:/runs"),
        ({**GOOD, "storage": "/running"}, "/running is on each machine's own disk"),
        (
            {**BUCKET, "storage": "s3://id:word@team/runs"},
            "s3://***@team/runs carries a credential",
        ),
        ({**BUCKET, "storage": "ftp://team/runs"}, "has a scheme that cannot be read"),
        (BUCKET, "cannot hold MLflow's database; add --set tracking.uri"),
        ({**GOOD, "name": "Demo"}, "--name: Demo is not a name of Kubernetes (RFC 1123)"),
        ({**GOOD, "name": "1a"}, "--name: 1a does not start with a letter"),
        ({**GOOD, "name": "a" * 42}, "has 42 characters; at most 41"),
        ({**GOOD, "namespace": "my.space"}, "--namespace: my.space is not a name"),
        ({**GOOD, "queue": "q/1"}, "--queue: q/1 is not a name of Kubernetes"),
        ({**GOOD, "secret": "S"}, "--secret: S is not a name of Kubernetes"),
        ({**GOOD, "claim": ["runs"]}, "--claim: runs is not NAME:PATH"),
        ({**GOOD, "claim": ["runs:data"]}, "--claim: runs:data is not NAME:PATH"),
        ({**GOOD, "claim": ["a:/x", "b:/x/"]}, "--claim: /x is mounted already"),
        ({**GOOD, "storage": "/runs/../etc"}, "storage.root: /runs/../etc has .. in it"),
        ({"image": "casemate", "storage": "/etc"}, "own disk; add --claim NAME:PATH and set"),
        ({**GOOD, "env": ["A=word"], "secret": "s"}, "--env: A is not the name of a variable"),
        ({**GOOD, "env": ["A"]}, "--env: A comes from a Secret; name it with --secret"),
        ({**GOOD, "env": ["RAY_AUTH_TOKEN"], "secret": "s"}, "is set by the file itself"),
        ({**GOOD, "kind": "skypilot"}, "--claim: runs:/runs belongs to Kubernetes"),
        ({**BUCKET, "kind": "ray-up", "queue": "q"}, "--queue: q belongs to Kubernetes"),
        ({**BUCKET, "kind": "ray-up", "env": ["A"]}, "cannot be handed to machines by ray up"),
        ({**GOOD, "node_gpus": 1}, "--node-gpus: 1 is set, but the recipe asks for no GPU"),
        ({**GOOD, "node_cpus": 0}, "--node-cpus: 0 must be at least 1"),
        ({**GOOD, "retries": -1}, "--retries: -1 is outside 0 to 100"),
        ({**GOOD, "retries": 99999999999}, "--retries: 99999999999 is outside 0 to 100"),
        ({**GOOD, "deadline": 0}, "--deadline: 0 is outside 1/60 (a minute) to 87600 hours"),
        ({**GOOD, "deadline": 0.0001}, "--deadline: 0.0001 is outside 1/60"),
        ({**GOOD, "deadline": 1e12}, "--deadline: 1000000000000.0 is outside 1/60"),
        ({**GOOD, "deadline": float("inf")}, "--deadline: inf is outside 1/60"),
        ({**GOOD, "deadline": float("nan")}, "--deadline: nan is outside 1/60"),
        ({**GOOD, "spot_label": "spot"}, "--spot-label: spot is not label=value"),
        ({**GOOD, "spot_label": "a=b"}, "--spot-label: a=b is used with --spot only; add it"),
        ({**GOOD, "kind": "raycluster", "retries": 2}, "--retries: 2 is not used by raycluster"),
        (
            {**GOOD, "kind": "raycluster", "deadline": 9},
            "--deadline: 9.0 is not used by raycluster",
        ),
        ({**BUCKET, "kind": "ray-up", "retries": 0}, "--retries: 0 is not used by ray-up"),
        ({**BUCKET, "kind": "ray-up", "deadline": 24}, "--deadline: 24.0 is not used by ray-up"),
        (
            {**BUCKET, "kind": "ray-up", "spot": True, "spot_label": "a=b"},
            "--spot-label: a=b is not used by ray-up; leave it out",
        ),
        (
            {**BUCKET, "kind": "skypilot", "spot": True, "spot_label": "a=b"},
            "--spot-label: a=b is not used by skypilot",
        ),
        ({**BUCKET, "kind": "skypilot", "retries": 1}, "--retries: 1 is not used by skypilot"),
        ({**GOOD, "queue": ""}, "--queue: is not a name of Kubernetes"),
        ({**GOOD, "name": ""}, "--name: is not a name of Kubernetes"),
        ({**BUCKET, "kind": "ray-up", "secret": ""}, "--secret: is not a name of Kubernetes"),
        ({**GOOD, "nodes": 3}, "--nodes: is unknown; did you mean"),
    ],
)
def test_bad_settings_are_refused(options, told):
    assert told in refused(**options)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        *((path, "would hide files that its pods need") for path in ("/", "/etc", "/tmp", "/home")),
        ("/opt/casemate", "would hide"),
        ("/home/casemate/", "would hide"),
        ("/dev/shm/x", "would hide"),
        ("/etc/casemate", "would hide"),
        ("/usr/local/lib", "would hide"),
        ("/runs/../etc", "has . or .. in its path"),
        ("/runs/./x", "has . or .. in its path"),
        ("/runs//x", "is not NAME:PATH"),
        ("", "is not NAME:PATH"),
    ],
)
def test_a_claim_hides_nothing_that_pods_need(path, told):
    line = refused(image="casemate", claim=[f"a:{path}"])
    assert line.startswith(f"--claim: a:{path} {told}")


@pytest.mark.parametrize("path", ["/runs", "/data/x", "/mnt/nfs", "/optimum", "/home/me", "/tmp/x"])
def test_other_paths_are_free(path):
    assert (
        f"mountPath: {path}\n" in api.manifest("demo", image="casemate", claim=[f"a:{path}"]).text
    )


@pytest.mark.parametrize(
    ("sets", "options", "told"),
    [
        (["cpus_per_train_worker=16"], {"node_cpus": 8}, "16 is more than a node has (8)"),
        (["gpus_per_train_worker=8"], {"node_gpus": 4}, "8 is more than a node has (4)"),
        (["gpus_per_actor=2"], {"node_gpus": 1}, "gpus_per_actor: 2.0 is more than a node has"),
        (["cpus_per_actor=9"], {"node_cpus": 8}, "cluster.cpus_per_actor: 9 is more"),
        (
            ["train_workers=8", "gpus_per_train_worker=1", "gpus_per_actor=1"],
            {"max_workers": 4},
            "cluster.train_workers: 8 need 8 nodes at the same time, 1 on each",
        ),
        (
            ["gpus_per_train_worker=16", "gpus_per_actor=16"],
            {"kind": "ray-up", "claim": []},
            "16 GPUs are more than any machine",
        ),
    ],
)
def test_a_recipe_that_asks_for_more_than_there_is_is_refused(sets, options, told):
    overrides = [*TRACKED, *(f"cluster.{text}" for text in sets)]
    line = refused(overrides=overrides, **{**GOOD, "storage": "s3://team/runs", **options})
    assert told in line


def test_a_file_that_the_operator_would_refuse_is_not_written(monkeypatch):
    monkeypatch.setattr("pipelines.deploy.rules.MAX_RAYJOB", 3)
    assert "rayjob would be refused by its operator: metadata.name: demo has" in refused(**GOOD)


def test_passwords_do_not_reach_the_file():
    line = refused(overrides=["tracking.uri=http://me:hidden-word@secured:5000"], **GOOD)
    assert "was written with a password" in line
    assert "hidden-word" not in line
    assert line.endswith("MLFLOW_TRACKING_PASSWORD with --secret NAME, the Secret that holds them")
    line = refused(overrides=["tracking.uri=sqlite:////mlflow.db"], **GOOD)
    assert "tracking.uri: /mlflow.db is on a machine's own disk" in line


@pytest.mark.parametrize(
    ("kind", "end"), [("skypilot", "_PASSWORD"), ("ray-up", "_PASSWORD to casemate submit")]
)
def test_the_remedy_for_a_password_is_one_that_the_kind_takes(kind, end):
    overrides = ["tracking.uri=http://me:hidden-word@secured:5000"]
    assert refused(kind=kind, overrides=overrides, **BUCKET).endswith(end)


def test_code_of_this_machine_is_refused_where_it_would_not_arrive(tmp_path):
    (tmp_path / "net.py").write_text(
        "from torch import nn\n\n\n"
        "def build(*, num_classes, image_size, channels):\n"
        "    size = channels * image_size**2\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(size, num_classes))\n"
    )
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "name: mine\ndata: {source: digits}\nmodel: {architecture: 'python:net.py:build'}\n"
        "train: {epochs: 1}\n"
    )
    line = refused(str(mine), **GOOD)
    assert "is code of this machine; install it in the image" in line
    made = api.manifest(str(mine), kind="raycluster", **GOOD)  # submit sends it
    assert made.name == "mine"
    assert f"casemate submit {mine}" in made.text


def test_relative_data_is_refused_and_other_data_is_pointed_out():
    line = refused("in1k-eps8-s12", **GOOD)
    assert line.startswith("data.path: data/imagenet is relative")
    assert "set data.path to the path that its machines see" in line
    text = api.manifest("in1k-eps8-s12", overrides=["data.path=/data/x"], **GOOD).text
    assert "# data.path: /data/x must be in the image, or on a claim" in text
    for kind in ("skypilot", "ray-up"):
        overrides = [*TRACKED, "data.path=/data/x"]
        text = api.manifest("in1k-eps8-s12", kind=kind, overrides=overrides, **BUCKET).text
        assert "# data.path: /data/x must be in the image, or be brought by file_mounts" in text
