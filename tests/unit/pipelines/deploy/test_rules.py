"""Rules that KubeRay's operator and Kueue check beyond their schemas."""

from typing import Any

import pytest

from pipelines import api
from pipelines.deploy import rules

JOB = {"image": "casemate:0.1.0", "claim": ["runs:/runs"]}
DELETE = {"deletionRules": [{"policy": "DeleteCluster", "condition": {}}]}
CPU = "spec.rayClusterSpec.workerGroupSpecs.0"


@pytest.fixture(scope="module")
def jobs() -> dict[str, Any]:
    queued = api.manifest("demo", queue="team", **JOB)
    return {"plain": api.manifest("demo", **JOB).documents[-1], "queued": queued.documents[-1]}


def changed(value: Any, path: str, new: Any) -> Any:
    """A copy with the value at a dotted path replaced; None removes it."""
    key, _, rest = path.partition(".")
    copy = list(value) if isinstance(value, list) else dict(value)
    place: Any = int(key) if isinstance(copy, list) else key
    if rest:
        copy[place] = changed(
            copy[place] if isinstance(copy, list) else copy.get(place, {}), rest, new
        )
    elif new is None:
        del copy[place]
    else:
        copy[place] = new
    return copy


@pytest.mark.parametrize(
    ("job", "path", "value", "told"),
    [
        ("queued", "spec.shutdownAfterJobFinishes", False, "spec.suspend: needs"),
        ("plain", "spec.shutdownAfterJobFinishes", False, "ttlSecondsAfterFinished: needs"),
        ("plain", "spec.deletionStrategy", DELETE, "excludes shutdownAfterJobFinishes"),
        ("queued", "spec.clusterSelector", {"a": "b"}, "spec.clusterSelector: excludes suspend"),
        ("plain", "spec.clusterSelector", {"a": "b"}, "clusterSelector: excludes backoffLimit"),
        ("plain", "spec.submissionMode", "SidecarMode", "submitterPodTemplate: excludes Sidecar"),
        ("plain", "spec.rayClusterSpec", None, "needs rayClusterSpec or clusterSelector"),
        ("plain", "spec.entrypointNumCpus", 1, "the head has no CPU for it"),
        ("plain", "spec.activeDeadlineSeconds", 0, "activeDeadlineSeconds: 0 is not positive"),
        ("plain", "spec.backoffLimit", -1, "backoffLimit: -1 is negative"),
        ("plain", f"{CPU}.template.spec.restartPolicy", "Always", "cpu: restartPolicy must be"),
        ("plain", "spec.rayClusterSpec.authOptions.mode", "disabled", "authOptions.mode: is not"),
        (
            *("plain", "spec.rayClusterSpec.authOptions.enableK8sTokenAuth", True),
            "enableK8sTokenAuth: is refused for a RayJob",
        ),
        ("plain", "spec.rayClusterSpec.rayVersion", "2.51.0", "2.51.0 has no token"),
        ("plain", "spec.rayClusterSpec.rayVersion", None, "none has no token"),
        ("plain", f"{CPU}.minReplicas", 9, "replicas are not between"),
        ("plain", f"{CPU}.groupName", "head", "the name head is taken"),
        ("plain", f"{CPU}.template.spec.containers", [], "cpu: has no container"),
        (
            *("plain", f"{CPU}.template.spec.containers.0.resources.requests.cpu", "1"),
            "cpu: requests and limits of ray-worker differ",
        ),
        ("plain", "spec.rayClusterSpec.autoscalerOptions.version", "v1", "needs autoscaler v2"),
        ("plain", "metadata.name", "a" * 48, "has more than 47 characters"),
        ("plain", "metadata.name", "1a", "does not start with a letter"),
        ("queued", "spec.rayClusterSpec.enableInTreeAutoscaling", True, "of a fixed size only"),
        ("queued", "spec.suspend", False, "Kueue needs shutdownAfterJobFinishes: true and suspend"),
    ],
)
def test_a_broken_rule_is_found(job, path, value, told, jobs):
    assert rules.problems([jobs[job]]) == []
    found = rules.problems([changed(jobs[job], path, value)])
    assert any(told in line for line in found), found


def test_a_job_inside_a_workflow_is_checked(jobs):
    workflow = api.manifest("demo", kind="argo", **JOB).documents[-1]
    assert rules.problems([workflow]) == []
    step = "spec.templates.0.resource.manifest"
    manifest = workflow["spec"]["templates"][0]["resource"]["manifest"]
    found = rules.problems(
        [changed(workflow, step, manifest.replace("mode: token", "mode: disabled"))]
    )
    assert len(found) == 1
