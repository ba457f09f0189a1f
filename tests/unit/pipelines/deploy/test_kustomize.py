"""`infra/k8s`: every overlay builds, is valid, and equals what `casemate manifest` writes."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipelines import api
from tests.unit.infra.misspelt import misspellings
from tests.unit.pipelines.deploy.files import FREE, ROOT, check, is_refused

K8S, GRAFANA = ROOT / "infra" / "k8s", ROOT / "infra" / "grafana"
BASE = {"image": "casemate:0.1.0", "claim": ["casemate:/runs"]}
GPUS = ["cluster.gpus_per_train_worker=1", "cluster.gpus_per_actor=1"]
EQUAL: dict[str, dict[str, Any]] = {
    "base": BASE,
    "gpu-spot": {**BASE, "overrides": GPUS, "spot": True},
    "kueue": {**BASE, "queue": "casemate"},
    "monitoring": BASE,
}
pytestmark = pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed")


def kustomized(folder: Path) -> subprocess.CompletedProcess[str]:
    command = ["kubectl", "kustomize", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def built(folder: Path) -> list[dict[str, Any]]:
    found = kustomized(folder)
    assert found.returncode == 0, found.stderr
    return list(yaml.safe_load_all(found.stdout))


@pytest.fixture(scope="module")
def overlays() -> dict[str, Any]:
    return {name: built(K8S / name) for name in EQUAL}


def test_every_folder_is_an_overlay_of_this_test():
    assert {path.parent.name for path in K8S.glob("*/kustomization.yaml")} == EQUAL.keys()


@pytest.mark.parametrize("name", EQUAL)
def test_an_overlay_is_valid_down_to_every_key(name, overlays):
    for document in overlays[name]:
        check(document)
        if document["kind"] == "RayJob":
            continue  # test_manifest.py
        amounts = {"requests"} if document["kind"] == "PersistentVolumeClaim" else set()
        for path, changed in misspellings(document, free=FREE | amounts):
            assert is_refused(changed), f"{document['kind']}: {path}"


@pytest.mark.parametrize("name", EQUAL)
def test_an_overlay_equals_the_command_on_its_first_lines(name, overlays):
    for document in api.manifest("demo", **EQUAL[name]).documents:
        assert document in overlays[name]


@pytest.mark.parametrize("folder", [*(K8S / name for name in EQUAL), GRAFANA], ids=lambda f: f.name)
def test_kustomize_refuses_a_misspelt_key(folder, tmp_path):
    shutil.copytree(K8S.parent, tmp_path / "infra")
    file = tmp_path / folder.relative_to(ROOT) / "kustomization.yaml"
    for path, changed in misspellings(yaml.safe_load(file.read_text()), free={"labels"}):
        file.write_text(yaml.safe_dump(changed))
        assert kustomized(file.parent).returncode, path


def test_every_file_is_used():
    for folder in (K8S / name for name in EQUAL):
        listed = yaml.safe_load((folder / "kustomization.yaml").read_text())
        patches = [patch["path"] for patch in listed.get("patches", ())]
        used = {*listed["resources"], *patches, *listed.get("configurations", ())}
        assert {path.name for path in folder.iterdir()} - {"kustomization.yaml"} <= used


def test_the_image_is_named_once(tmp_path):
    shutil.copytree(K8S.parent, tmp_path / "infra")
    file = tmp_path / "infra" / "k8s" / "base" / "kustomization.yaml"
    file.write_text(file.read_text().replace("newName: casemate", "newName: registry/mine"))
    text = yaml.safe_dump_all(built(tmp_path / "infra" / "k8s" / "gpu-spot"))
    assert text.count("image: registry/mine:0.1.0") == 4  # submitter, head, two groups
    assert "image: casemate" not in text


def test_the_queue_has_room_for_the_job(overlays):
    (queue,) = (d for d in overlays["kueue"] if d["kind"] == "ClusterQueue")
    quotas = {
        entry["name"]: entry["nominalQuota"]
        for entry in queue["spec"]["resourceGroups"][0]["flavors"][0]["resources"]
    }
    (job,) = (d["spec"] for d in overlays["kueue"] if d["kind"] == "RayJob")
    cluster = job["rayClusterSpec"]
    pods = [(1, job["submitterPodTemplate"]), (1, cluster["headGroupSpec"]["template"])]
    pods += [(g["maxReplicas"], g["template"]) for g in cluster["workerGroupSpecs"]]
    asked = [(n, c["resources"]["limits"]) for n, p in pods for c in p["spec"]["containers"]]
    assert sum(n * cpus(one["cpu"]) for n, one in asked) <= quotas["cpu"]
    gib = sum(n * int(one["memory"].removesuffix("Gi")) for n, one in asked)
    assert gib <= int(quotas["memory"].removesuffix("Gi"))


def cpus(text: str) -> float:
    return int(text[:-1]) / 1000 if text.endswith("m") else int(text)


def test_metrics_ports_are_those_of_the_pods(overlays):
    monitor, policy = (
        next(
            d for d in overlays["monitoring"] if d["metadata"]["name"] == name and d["kind"] == kind
        )
        for name, kind in (("casemate", "PodMonitor"), ("casemate-metrics", "NetworkPolicy"))
    )
    (job,) = (d["spec"] for d in overlays["monitoring"] if d["kind"] == "RayJob")
    head = job["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    ports = {port["name"]: port["containerPort"] for port in head["ports"]}
    scraped = [entry["port"] for entry in monitor["spec"]["podMetricsEndpoints"]]
    assert [entry["port"] for entry in policy["spec"]["ingress"][0]["ports"]] == [
        ports[name] for name in scraped
    ]


def test_alerts_are_those_of_prometheus():
    file = K8S / "monitoring" / "rules.yaml"
    wanted = yaml.safe_load((GRAFANA / "rules.yaml").read_text())["groups"]
    if os.environ.get("CASEMATE_RENEW_SNAPSHOTS"):
        text = (GRAFANA / "rules.yaml").read_text()
        below = "".join(
            f"  {line}".rstrip() + "\n" for line in text[text.index("groups:") :].splitlines()
        )
        file.write_text(file.read_text().partition("spec:\n")[0] + "spec:\n" + below)
    assert yaml.safe_load(file.read_text())["spec"]["groups"] == wanted, "renew it"
