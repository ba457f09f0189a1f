"""Pods of a Ray cluster on Kubernetes: head, workers and the pod that submits the job."""

from typing import Any

from pipelines.deploy.flow import RECIPE_FILE, RECIPE_FOLDER, Flow
from pipelines.deploy.shapes import HEAD_CPUS, HEAD_GIB, Group
from pipelines.deploy.text import Document, note
from pipelines.runtime.worker_env import FIXED_ENV

FLOW_LABEL = "casemate/flow"  # of every pod of the cluster: what the NetworkPolicy selects
USER = 1000  # of the image; not root
GPU = "nvidia.com/gpu"
DASHBOARD = 8265
HEAD_PORTS = {
    "gcs-server": 6379,
    "dashboard": DASHBOARD,
    "client": 10001,
    "metrics": 8080,
    "as-metrics": 44217,
    "dash-metrics": 44227,
}
CONTAINER_SECURITY = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
_FIXED = [{"name": name, "value": value} for name, value in FIXED_ENV.items()]


def head_pod(flow: Flow, *, autoscaling: bool) -> Document:
    """The head: driver, dashboard and autoscaler; on a machine that stays."""
    container = _container(flow, "ray-head", cpus=HEAD_CPUS, memory=HEAD_GIB, gpus=0)
    container["ports"] = [
        {"containerPort": port, "name": name} for name, port in HEAD_PORTS.items()
    ]
    volumes = _volumes(flow, shared_memory=HEAD_GIB // 2)
    if flow.file is not None:
        container["volumeMounts"].append({"name": "recipe", "mountPath": RECIPE_FOLDER})
        name = recipe_map_name(flow)
        entries = [{"key": RECIPE_FILE, "path": RECIPE_FILE}]
        volumes.append({"name": "recipe", "configMap": {"name": name, "items": entries}})
    more = {} if autoscaling else {"automountServiceAccountToken": False}
    return _template(flow, {**more, "containers": [container], "volumes": volumes})


def worker_pod(flow: Flow, group: Group) -> Document:
    """A worker of a group; on spot machines if they are asked for."""
    container = _container(
        flow, "ray-worker", cpus=group.cpus, memory=group.memory, gpus=group.gpus
    )
    container["ports"] = [{"containerPort": HEAD_PORTS["metrics"], "name": "metrics"}]
    spec: Document = {"automountServiceAccountToken": False}
    label, _, value = flow.settings.spot_label.partition("=")
    tolerations: list[dict[str, str]] = []
    if group.gpus:
        tolerations.append({"key": GPU, "operator": "Exists", "effect": "NoSchedule"})
    if flow.settings.spot:
        spec |= note("another cloud has another label and taint: --spot-label")
        spec["nodeSelector"] = {label: value}
        tolerations.append(
            {"key": label, "operator": "Equal", "value": value, "effect": "NoSchedule"}
        )
    if tolerations:
        spec["tolerations"] = tolerations
    volumes = _volumes(flow, shared_memory=group.shared_memory)
    return _template(flow, {**spec, "containers": [container], "volumes": volumes})


def submitter_pod(flow: Flow) -> Document:
    """The pod that submits the job and shows its log; KubeRay adds the command."""
    container = {
        "name": "ray-job-submitter",
        "image": flow.image,
        "resources": _resources({"cpu": "500m", "memory": "1Gi"}),
        "securityContext": CONTAINER_SECURITY,
    }
    spec = {**_POD, "automountServiceAccountToken": False, "containers": [container]}
    return {"spec": spec}


def recipe_map_name(flow: Flow) -> str:
    """The name of the ConfigMap that holds the recipe."""
    return f"{flow.name}-recipe"


_POD: Document = {
    "restartPolicy": "Never",  # what the autoscaler demands: a failed pod is replaced
    "securityContext": {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    },
}


def _template(flow: Flow, spec: Document) -> Document:
    return {"metadata": {"labels": {FLOW_LABEL: flow.name}}, "spec": {**_POD, **spec}}


def _container(flow: Flow, name: str, *, cpus: int, memory: int, gpus: int) -> Document:
    amounts = {"cpu": str(cpus), "memory": f"{memory}Gi", **({GPU: str(gpus)} if gpus else {})}
    return {
        "name": name,
        "image": flow.image,
        "resources": _resources(amounts),
        "securityContext": CONTAINER_SECURITY,
        **_environment(flow),
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "scratch", "mountPath": "/tmp"},
            *({"name": claim.volume, "mountPath": claim.path} for claim in flow.claims),
        ],
    }


def _resources(amounts: dict[str, str]) -> Document:
    """Requests equal limits: Ray reads the limits, and nothing is evicted for using its share."""
    return {"requests": dict(amounts), "limits": dict(amounts)}


def _environment(flow: Flow) -> Document:
    """Fixed variables, and those of the Secret by reference."""
    secret, names = flow.settings.secret, flow.settings.env
    by_name = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": name}}}
        for name in names
    ]
    whole: Document = {"envFrom": [{"secretRef": {"name": secret}}]} if secret and not names else {}
    return {"env": [*_FIXED, *by_name], **whole}


def _volumes(flow: Flow, *, shared_memory: int) -> list[dict[str, Any]]:
    """Shared memory, a disk for Ray's files and the cache of a bucket, and the claims."""
    shm = {"medium": "Memory", "sizeLimit": f"{shared_memory}Gi"}
    return [
        {"name": "shm", "emptyDir": shm},
        {"name": "scratch", "emptyDir": {}},
        *(
            {"name": volume, "persistentVolumeClaim": {"claimName": name}}
            for volume, name in {claim.volume: claim.name for claim in flow.claims}.items()
        ),
    ]
