"""`casemate manifest`: complete files, equal to the reviewed ones, valid, and true to the recipe.

Renew the reviewed files with `CASEMATE_RENEW_SNAPSHOTS=1 pytest tests/unit/pipelines/deploy`.
"""

import os
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from pipelines import api
from pipelines.cli.main import app
from pipelines.deploy.settings import ManifestSettings
from pipelines.recipe.load import load, loads
from tests.unit.pipelines.deploy.files import ROOT, check, is_refused, misspelt

GOLDEN = Path(__file__).parent / "golden"
SHIPPED = ROOT / "infra" / "k8s" / "base" / "rayjob.yaml"
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
    path = SHIPPED if case == "demo-rayjob" else GOLDEN / f"{case}.yaml"
    if os.environ.get("CASEMATE_RENEW_SNAPSHOTS"):
        manifests[case].write(path)
    assert path.is_file(), f"no file for {case}: {RENEW}"
    assert manifests[case].text == path.read_text(), RENEW


def test_no_reviewed_file_outlives_its_case():
    assert {path.stem for path in GOLDEN.iterdir()} == CASES.keys() - {"demo-rayjob"}


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
