"""An Argo WorkflowTemplate with one step: a RayJob, followed to its end."""

from pipelines.deploy.flow import Flow
from pipelines.deploy.kubernetes import in_namespace, metadata, shared_resources
from pipelines.deploy.rayjob import rayjob
from pipelines.deploy.text import Document, note, to_text, without_notes

API = "argoproj.io/v1alpha1"
RBAC = "rbac.authorization.k8s.io"
SUCCESS = "status.jobStatus == SUCCEEDED"
# Not jobStatus: it is FAILED, too, while the operator retries on a new cluster.
FAILURE = "status.jobDeploymentStatus in (Failed, ValidationFailed)"
RULES = [
    {"apiGroups": ["ray.io"], "resources": ["rayjobs"], "verbs": ["create", "get", "watch"]},
    {
        "apiGroups": ["argoproj.io"],
        "resources": ["workflowtaskresults"],
        "verbs": ["create", "patch"],
    },
]


def documents(flow: Flow) -> list[Document]:
    """The resources to apply, in this order."""
    meta = metadata(flow)
    account = {"kind": "ServiceAccount", "name": flow.name}
    if space := flow.settings.namespace:
        account["namespace"] = space
    role = {"apiGroup": RBAC, "kind": "Role", "name": flow.name}
    rbac = f"{RBAC}/v1"
    return [
        *shared_resources(flow),
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta},
        {"apiVersion": rbac, "kind": "Role", "metadata": meta, "rules": RULES},
        {
            "apiVersion": rbac,
            "kind": "RoleBinding",
            "metadata": meta,
            "roleRef": role,
            "subjects": [account],
        },
        _workflow(flow),
    ]


def header(flow: Flow) -> list[str]:
    """How the file is used."""
    return [
        f"once:   {in_namespace(flow, 'kubectl')} apply -f FILE",
        f"start:  {in_namespace(flow, 'argo')} submit --from workflowtemplate/{flow.name} --watch",
        "A step of another workflow: templateRef {name: " + flow.name + ", template: flow}",
    ]


def _workflow(flow: Flow) -> Document:
    job = without_notes(rayjob(flow))
    job["metadata"] = {"generateName": f"{flow.name}-", **_without(job["metadata"], "name")}
    step = {
        "name": "flow",
        "resource": {
            "action": "create",
            "setOwnerReference": True,
            "successCondition": SUCCESS,
            **note("jobStatus is FAILED, too, while the operator retries on a new cluster"),
            "failureCondition": FAILURE,
            "manifest": to_text([job]),
        },
    }
    return {
        "apiVersion": API,
        "kind": "WorkflowTemplate",
        "metadata": metadata(flow),
        "spec": {"entrypoint": "flow", "serviceAccountName": flow.name, "templates": [step]},
    }


def _without(values: Document, key: str) -> Document:
    return {name: value for name, value in values.items() if name != key}
