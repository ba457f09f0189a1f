"""A RayCluster of KubeRay that stays: flows are sent to it by `casemate submit`."""

from pipelines.deploy.flow import Flow
from pipelines.deploy.kubernetes import (
    RAY_API,
    cluster_spec,
    in_namespace,
    metadata,
    network_policy,
)
from pipelines.deploy.text import Document


def documents(flow: Flow) -> list[Document]:
    """The resources to apply, in this order; `submit` brings the recipe."""
    queued = {"suspend": True} if flow.settings.queue else {}
    cluster = {
        "apiVersion": RAY_API,
        "kind": "RayCluster",
        "metadata": metadata(flow, queued=True),
        "spec": {**queued, **cluster_spec(flow)},
    }
    return [network_policy(flow), cluster]


def header(flow: Flow) -> list[str]:
    """How the file is used."""
    kubectl = in_namespace(flow, "kubectl")
    secret = f"{kubectl} get secret {flow.name} -o jsonpath='{{.data.auth_token}}' | base64 -d"
    return [
        f"start:  {kubectl} apply -f FILE",
        f"reach:  {kubectl} port-forward service/{flow.name}-head-svc 8265",
        f'        export RAY_AUTH_MODE=token RAY_AUTH_TOKEN="$({secret})"',
        f"run:    {flow.submit}",
    ]
