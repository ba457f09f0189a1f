"""Resources that the kinds for Kubernetes share: cluster specification, NetworkPolicy, recipe."""

from importlib.metadata import version
from typing import Any

from pipelines.deploy.flow import RECIPE_FILE, Flow
from pipelines.deploy.pods import (
    CONTAINER_SECURITY,
    DASHBOARD,
    FLOW_LABEL,
    head_pod,
    recipe_map_name,
    worker_pod,
)
from pipelines.deploy.shapes import Group
from pipelines.deploy.text import Document, note

RAY_API = "ray.io/v1"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
OPERATOR = {"app.kubernetes.io/component": "kuberay-operator"}  # of its pods, however installed
IDLE_SECONDS = 120  # before a node without work is given back


def metadata(flow: Flow, *, name: str | None = None, queued: bool = False) -> Document:
    """Name, namespace and labels of a resource; `queued`: Kueue admits it."""
    labels = {"app.kubernetes.io/name": "casemate", FLOW_LABEL: flow.name}
    if queued and flow.settings.queue:
        labels[QUEUE_LABEL] = flow.settings.queue
    space = {"namespace": flow.settings.namespace} if flow.settings.namespace else {}
    return {"name": name or flow.name, **space, "labels": labels}


def in_namespace(flow: Flow, command: str) -> str:
    """A command of kubectl or argo, in the flow's namespace if it has one."""
    space = flow.settings.namespace
    return f"{command} --namespace {space}" if space else command


def cluster_spec(flow: Flow) -> Document:
    """The Ray cluster: a head without work, and groups of workers that grow from nothing.

    Kueue reserves a fixed cluster and refuses autoscaling.
    """
    autoscaling = flow.settings.queue is None
    spec: Document = {
        "rayVersion": version("ray"),
        **note("the operator makes a Secret with the token and hands it to every pod"),
        "authOptions": {"mode": "token"},
        "enableInTreeAutoscaling": autoscaling,
    }
    if autoscaling:
        spec["autoscalerOptions"] = {
            "version": "v2",
            "idleTimeoutSeconds": IDLE_SECONDS,
            "securityContext": CONTAINER_SECURITY,
        }
    spec["headGroupSpec"] = {
        "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
        "template": head_pod(flow, autoscaling=autoscaling),
    }
    spec["workerGroupSpecs"] = [_worker_group(flow, group) for group in flow.groups]
    return spec


def _worker_group(flow: Flow, group: Group) -> Document:
    most = group.max_nodes
    least = 0 if flow.settings.queue is None else most
    idle = {"idleTimeoutSeconds": IDLE_SECONDS} if flow.settings.queue is None else {}
    return {
        "groupName": group.name,
        "replicas": least,
        "minReplicas": least,
        "maxReplicas": most,
        **idle,
        "rayStartParams": {},
        "template": worker_pod(flow, group),
    }


def shared_resources(flow: Flow) -> list[Document]:
    """What a job needs beside it: a closed network; the recipe, if the image does not have it."""
    found = [network_policy(flow)]
    if flow.file is not None:
        name = recipe_map_name(flow)
        found.insert(0, _resource("v1", "ConfigMap", flow, name, data={RECIPE_FILE: flow.file}))
    return found


def _resource(api: str, kind: str, flow: Flow, name: str, **content: Any) -> Document:
    return {"apiVersion": api, "kind": kind, "metadata": metadata(flow, name=name), **content}


def network_policy(flow: Flow) -> Document:
    """Pods of the cluster reach each other; others reach the dashboard's port at most.

    The operator reads the state of the job from the dashboard, too.
    """
    own = {"podSelector": {"matchLabels": {FLOW_LABEL: flow.name}}}
    operator = {"namespaceSelector": {}, "podSelector": {"matchLabels": OPERATOR}}
    spec: Document = {
        **own,
        **note("outgoing traffic stays open: storage, MLflow, names, the API server"),
        "policyTypes": ["Ingress"],
        "ingress": [
            {"from": [own]},
            {
                "ports": [{"port": DASHBOARD, "protocol": "TCP"}],
                **note("pods of this namespace, and the operator in its own"),
                "from": [{"podSelector": {}}, operator],
            },
        ],
    }
    return _resource("networking.k8s.io/v1", "NetworkPolicy", flow, flow.name, spec=spec)
