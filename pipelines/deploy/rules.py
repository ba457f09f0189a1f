"""What KubeRay's operator and Kueue refuse beyond their schemas; none of it is ever written.

The operator would accept such a file and then mark it as failed. `problems` also checks files that
were changed by hand or by kustomize.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from pipelines.deploy.kubernetes import QUEUE_LABEL
from pipelines.deploy.names import MAX_RAYJOB
from pipelines.deploy.text import Document, without_notes

MAX_RAYCLUSTER = 53
MAX_GROUPS = 7  # of workers, in a workload of Kueue
MIN_RAY = (2, 52)  # for token authentication


def problems(documents: Sequence[Document]) -> list[str]:
    """A line for every rule that a document breaks."""
    found: list[str] = []
    for document in map(without_notes, documents):
        kind, spec = document.get("kind"), document.get("spec", {})
        if kind == "RayJob":
            found += _rayjob(document, spec)
        elif kind == "RayCluster":
            found += _name(document, MAX_RAYCLUSTER)
            found += _cluster(spec, queued=_queued(document))
        elif kind == "WorkflowTemplate":
            made = (step.get("resource", {}).get("manifest", "") for step in spec["templates"])
            found += problems([values for text in made for values in yaml.safe_load_all(text)])
    return found


def _queued(document: Document) -> bool:
    return QUEUE_LABEL in document["metadata"].get("labels", {})


def _name(document: Document, most: int) -> Iterator[str]:
    meta = document["metadata"]
    name = meta.get("name") or f"{meta.get('generateName', '')}xxxxx"
    if len(name) > most:
        yield f"metadata.name: {name} has more than {most} characters"
    if not name[:1].isalpha():
        yield f"metadata.name: {name} does not start with a letter"


def _rayjob(document: Document, spec: Document) -> Iterator[str]:
    yield from _name(document, MAX_RAYJOB)
    shutdown, mode = spec.get("shutdownAfterJobFinishes"), spec.get("submissionMode")
    if spec.get("suspend") and not shutdown:
        yield "spec.suspend: needs shutdownAfterJobFinishes: true"
    if spec.get("ttlSecondsAfterFinished") and not shutdown:
        yield "spec.ttlSecondsAfterFinished: needs shutdownAfterJobFinishes: true"
    if "deletionRules" in spec.get("deletionStrategy", {}) and shutdown:
        yield "spec.deletionStrategy.deletionRules: excludes shutdownAfterJobFinishes"
    if "clusterSelector" in spec:
        for key in ("suspend", "backoffLimit", "rayClusterSpec"):
            if spec.get(key):
                yield f"spec.clusterSelector: excludes {key}"
        if mode == "SidecarMode":
            yield "spec.clusterSelector: excludes SidecarMode"
    elif "rayClusterSpec" not in spec:
        yield "spec: needs rayClusterSpec or clusterSelector"
    submitter = spec.get("submitterPodTemplate", {"spec": {}})["spec"]
    yield from _containers("submitter", submitter.get("containers", []))
    if mode == "SidecarMode" and "submitterPodTemplate" in spec:
        yield "spec.submitterPodTemplate: excludes SidecarMode"
    for key in ("activeDeadlineSeconds", "preRunningDeadlineSeconds"):
        if spec.get(key, 1) <= 0:
            yield f"spec.{key}: {spec[key]} is not positive"
    if spec.get("backoffLimit", 0) < 0:
        yield f"spec.backoffLimit: {spec['backoffLimit']} is negative"
    if _queued(document) and not (shutdown and spec.get("suspend")):
        yield "metadata.labels: Kueue needs shutdownAfterJobFinishes: true and suspend: true"
    cluster = spec.get("rayClusterSpec")
    if cluster:
        if cluster.get("authOptions", {}).get("enableK8sTokenAuth"):
            yield "spec.rayClusterSpec.authOptions.enableK8sTokenAuth: is refused for a RayJob"
        yield from _cluster(cluster, queued=_queued(document))
        yield from _entrypoint(spec, cluster)


def _entrypoint(spec: Document, cluster: Document) -> Iterator[str]:
    """A head without CPUs never starts an entrypoint that asks for one."""
    head = cluster["headGroupSpec"].get("rayStartParams", {})
    if head.get("num-cpus") == "0" and spec.get("entrypointNumCpus", 0):
        yield "spec.entrypointNumCpus: the head has no CPU for it"


def _cluster(spec: Document, *, queued: bool) -> Iterator[str]:
    groups = spec.get("workerGroupSpecs", [])
    scaling = bool(spec.get("enableInTreeAutoscaling"))
    v2 = scaling and spec.get("autoscalerOptions", {}).get("version") == "v2"
    for name, group in (("head", spec["headGroupSpec"]), *((g["groupName"], g) for g in groups)):
        pod = group["template"]["spec"]
        if v2 and pod.get("restartPolicy", "Never") != "Never":
            yield f"{name}: restartPolicy must be Never with autoscaler v2"
        if not pod.get("containers"):
            yield f"{name}: has no container"
        yield from _containers(name, pod.get("containers", []))
    for group in groups:
        least, most = group.get("minReplicas", 0), group.get("maxReplicas", 0)
        if not least <= group.get("replicas", least) <= most:
            yield f"{group['groupName']}: replicas are not between minReplicas and maxReplicas"
        if "idleTimeoutSeconds" in group and not v2:
            yield f"{group['groupName']}: idleTimeoutSeconds needs autoscaler v2"
    yield from _authentication(spec)
    if queued and scaling:
        yield "enableInTreeAutoscaling: Kueue admits clusters of a fixed size only"
    if queued and len(groups) > MAX_GROUPS:
        yield f"workerGroupSpecs: Kueue admits {MAX_GROUPS} groups at most"
    if any(group["groupName"] == "head" for group in groups):
        yield "workerGroupSpecs: the name head is taken"


def _containers(name: str, containers: list[dict[str, Any]]) -> Iterator[str]:
    """Ray counts the limits: less in the requests would be promised twice."""
    for container in containers:
        resources = container.get("resources", {})
        if not resources or resources.get("limits") != resources.get("requests"):
            yield f"{name}: requests and limits of {container.get('name')} differ"


def _authentication(spec: Document) -> Iterator[str]:
    if spec.get("authOptions", {}).get("mode") != "token":
        yield "authOptions.mode: is not token: anyone who reaches the cluster can run code"
    ray = str(spec.get("rayVersion", ""))
    parts = tuple(int(part) for part in ray.split(".")[:2] if part.isdigit())
    if parts < MIN_RAY:
        yield f"rayVersion: {ray or 'none'} has no token authentication"
