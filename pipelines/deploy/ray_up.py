"""A file of Ray's cluster launcher (`ray up`), for machines of AWS."""

from importlib.metadata import version
from typing import NamedTuple

from components.core.errors import CasemateError
from pipelines.deploy.flow import Flow
from pipelines.deploy.kubernetes import IDLE_SECONDS
from pipelines.deploy.shapes import HEAD_CPUS, HEAD_GIB, Group
from pipelines.deploy.text import Document, note
from pipelines.runtime.worker_env import FIXED_ENV

TOKEN = "~/.ray/auth_token"  # where Ray looks for it


class Machine(NamedTuple):
    """A type of machines of AWS: CPUs, GiB, GPUs."""

    name: str
    cpus: int
    memory: int
    gpus: int = 0


MACHINES = (  # cheapest first
    Machine("m5.large", 2, 8),
    Machine("m5.xlarge", 4, 16),
    Machine("m5.2xlarge", 8, 32),
    Machine("m5.4xlarge", 16, 64),
    Machine("m5.8xlarge", 32, 128),
    Machine("m5.12xlarge", 48, 192),
    Machine("m5.24xlarge", 96, 384),
    Machine("g5.xlarge", 4, 16, 1),
    Machine("g5.2xlarge", 8, 32, 1),
    Machine("g5.4xlarge", 16, 64, 1),
    Machine("g5.8xlarge", 32, 128, 1),
    Machine("g5.16xlarge", 64, 256, 1),
    Machine("g5.12xlarge", 48, 192, 4),
    Machine("g5.24xlarge", 96, 384, 4),
    Machine("g5.48xlarge", 192, 768, 8),
    Machine("p4d.24xlarge", 96, 1152, 8),
)


def documents(flow: Flow) -> list[Document]:
    """The one document of the file."""
    workers = {group.name: _workers(flow, group) for group in flow.groups}
    head = _machine(cpus=HEAD_CPUS, memory=HEAD_GIB, gpus=0)
    cluster: Document = {
        "cluster_name": flow.name,
        "max_workers": sum(group.max_nodes for group in flow.groups),
        "idle_timeout_minutes": IDLE_SECONDS // 60,
        **note("your region; its machines need a role that may read and write the storage"),
        "provider": {"type": "aws", "region": "us-east-1", "cache_stopped_nodes": False},
        "auth": {"ssh_user": "ubuntu"},
        "docker": {
            "image": flow.image,
            "container_name": "casemate",
            "run_options": [
                f"--shm-size={max(group.shared_memory for group in flow.groups)}g",
                "--ulimit nofile=65536:65536",
                *(f"--env {name}={value}" for name, value in FIXED_ENV.items()),
            ],
        },
        "available_node_types": {
            "head": {
                "resources": {"CPU": 0},
                "max_workers": 0,
                "node_config": {"InstanceType": head.name},
            },
            **workers,
        },
        "head_node_type": "head",
        **note("made by: ray get-auth-token --generate"),
        "file_mounts": {TOKEN: TOKEN},
        "head_start_ray_commands": [
            "ray stop",
            "RAY_AUTH_MODE=token ray start --head --port=6379 --num-cpus=0 "
            "--dashboard-host=127.0.0.1 --autoscaling-config=~/ray_bootstrap_config.yaml",
        ],
        "worker_start_ray_commands": [
            "ray stop",
            "RAY_AUTH_MODE=token ray start --address=$RAY_HEAD_IP:6379",
        ],
    }
    return [cluster]


def header(flow: Flow) -> list[str]:
    """How the file is used."""
    return [
        f"needs:  ray {version('ray')} and boto3 here, and credentials of AWS",
        "once:   ray get-auth-token --generate",
        "start:  ray up FILE     reach: ray dashboard FILE     end: ray down FILE",
        f"run:    RAY_AUTH_MODE=token {flow.submit}",
    ]


def _workers(flow: Flow, group: Group) -> Document:
    machine = _machine(cpus=group.cpus, memory=group.memory, gpus=group.gpus)
    config: Document = {"InstanceType": machine.name}
    if flow.settings.spot:
        config["InstanceMarketOptions"] = {"MarketType": "spot"}
    resources = {"CPU": machine.cpus, **({"GPU": machine.gpus} if machine.gpus else {})}
    return {
        "min_workers": 0,
        "max_workers": group.max_nodes,
        "resources": resources,
        "node_config": config,
    }


def _machine(*, cpus: int, memory: int, gpus: int) -> Machine:
    """The smallest type of machines that has all of this."""
    for machine in MACHINES:
        enough = machine.cpus >= cpus and machine.memory >= memory and machine.gpus >= gpus
        if enough and bool(machine.gpus) == bool(gpus):
            return machine
    asked = f"{cpus} CPUs, {memory} GiB and {gpus} GPUs"
    raise CasemateError(
        "--node-cpus", asked, "are more than any machine of the list has; ask for less"
    )
