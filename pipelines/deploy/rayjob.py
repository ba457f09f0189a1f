"""A RayJob of KubeRay: one job, one cluster, one flow; deleted when the flow has ended."""

import math

from pipelines.deploy.flow import Flow
from pipelines.deploy.kubernetes import (
    RAY_API,
    cluster_spec,
    in_namespace,
    metadata,
    shared_resources,
)
from pipelines.deploy.pods import submitter_pod
from pipelines.deploy.text import Document, note

KEPT_SECONDS = 600  # the cluster, after its job has ended: logs can be read
MAX_SECONDS = 2**31 - 1  # of fields of Kubernetes


def documents(flow: Flow) -> list[Document]:
    """The resources to apply, in this order."""
    return [*shared_resources(flow), rayjob(flow)]


def header(flow: Flow) -> list[str]:
    """How the file is used."""
    kubectl = in_namespace(flow, "kubectl")
    return [
        f"start:  {kubectl} apply -f FILE     again: {kubectl} replace --force -f FILE",
        f"follow: {kubectl} logs -f -l job-name={flow.name}     end: {kubectl} delete -f FILE",
        "A flow that was ended goes on where it was: finished work is in the storage.",
    ]


def rayjob(flow: Flow) -> Document:
    """The RayJob. A failed cluster is replaced by a new one: finished work is in the storage."""
    settings = flow.settings
    queued = {"suspend": True} if settings.queue else {}
    spec: Document = {
        "entrypoint": flow.command,
        **note("the driver runs on the head, which has no CPU for work"),
        "entrypointNumCpus": 0,
        "submissionMode": "K8sJobMode",
        "submitterPodTemplate": submitter_pod(flow),
        **queued,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": KEPT_SECONDS,
        "activeDeadlineSeconds": round(settings.deadline * 3600),
        "preRunningDeadlineSeconds": _seconds(flow.recipe.cluster.max_wait),
        "backoffLimit": settings.retries,
        "rayClusterSpec": cluster_spec(flow),
    }
    return {
        "apiVersion": RAY_API,
        "kind": "RayJob",
        "metadata": metadata(flow, queued=True),
        "spec": spec,
    }


def _seconds(wait: float) -> int:
    """A wait as KubeRay takes it; a recipe may wait for less than a second, or very long."""
    return math.ceil(min(wait, MAX_SECONDS))
