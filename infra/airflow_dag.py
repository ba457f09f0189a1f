"""A flow as an Airflow task: creates a RayJob and waits until it ends.

Copy it into the folder of DAGs, beside `flow.yaml`, which `casemate manifest RECIPE --kind rayjob`
writes. Needs apache-airflow-providers-cncf-kubernetes and a connection `kubernetes_default`.
The provider for Ray is deprecated. A retried task continues the flow: finished steps are skipped.
"""

from pathlib import Path

import yaml
from airflow.providers.cncf.kubernetes.hooks.kubernetes import KubernetesHook
from airflow.sdk import dag, task
from airflow.sdk.exceptions import AirflowFailException

RAYJOBS = {"group": "ray.io", "version": "v1", "plural": "rayjobs", "namespace": "casemate"}


@dag(schedule=None, catchup=False)
def casemate():
    @task
    def start() -> str:
        documents = yaml.safe_load_all(Path(__file__).with_name("flow.yaml").read_text())
        job = next(document for document in documents if document["kind"] == "RayJob")
        job["metadata"]["generateName"] = job["metadata"].pop("name") + "-"  # one job per run
        return KubernetesHook().create_custom_object(**RAYJOBS, body=job)["metadata"]["name"]

    @task.sensor(mode="reschedule", poke_interval=60, timeout=7 * 86400)
    def end(name: str) -> bool:
        status = KubernetesHook().get_custom_object(**RAYJOBS, name=name).get("status", {})
        if status.get("jobDeploymentStatus") == "Failed":  # after all its retries
            raise AirflowFailException(status.get("message", f"{name} failed"))
        return status.get("jobDeploymentStatus") == "Complete"

    end(start())


casemate()
