"""A flow as an Airflow task: creates what `flow.yaml` holds and waits until its RayJob ends.

Copy it into the folder of DAGs, beside `flow.yaml`, which
`casemate manifest RECIPE --kind rayjob --namespace casemate` writes.
Needs apache-airflow-providers-cncf-kubernetes and a connection `kubernetes_default`, whose account
may create and get rayjobs, and create and patch configmaps and networkpolicies.
The provider for Ray is deprecated. Cleared tasks continue the flow: finished steps are skipped.
"""

from pathlib import Path

import yaml
from airflow.providers.cncf.kubernetes.hooks.kubernetes import KubernetesHook
from airflow.sdk import dag, task
from airflow.sdk.exceptions import AirflowFailException
from kubernetes.utils import create_from_yaml

NAMESPACE = "casemate"
APPLY = {"namespace": NAMESPACE, "apply": True, "force_conflicts": True}  # made, or changed
RAYJOBS = {"group": "ray.io", "version": "v1", "plural": "rayjobs", "namespace": NAMESPACE}
*BESIDE, JOB = yaml.safe_load_all(Path(__file__).with_name("flow.yaml").read_text())
SPEC = JOB["spec"]
MOST = SPEC["activeDeadlineSeconds"] * (1 + SPEC["backoffLimit"]) + 86400  # a day in a queue


@dag(schedule=None, catchup=False, max_active_runs=1)
def casemate():
    @task
    def start() -> str:
        hook, named = KubernetesHook(), dict(JOB["metadata"])
        create_from_yaml(hook.api_client, yaml_objects=BESIDE, **APPLY)  # recipe, NetworkPolicy
        named["generateName"] = named.pop("name") + "-"  # one job per run
        body = {**JOB, "metadata": named}
        return hook.create_custom_object(**RAYJOBS, body=body)["metadata"]["name"]

    @task.sensor(mode="reschedule", poke_interval=60, timeout=MOST)
    def end(name: str) -> bool:
        status = KubernetesHook().get_custom_object(**RAYJOBS, name=name).get("status", {})
        state = status.get("jobDeploymentStatus")
        if state in ("Failed", "ValidationFailed"):  # after all its retries
            raise AirflowFailException(status.get("message") or f"{name}: {state}")
        return state == "Complete"

    end(start())


casemate()
