"""Where a worker computes: what Ray gave it, checked with the torch of its own machine.

A driver never asks torch for GPUs: it often runs on a machine without any.
"""

import os
import platform
import time
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import AuthenticationError

from components.core.errors import CasemateError, first_line
from pipelines.runtime.cluster import check_reachable, refused_token

if TYPE_CHECKING:  # workers import this module and need no recipe
    from pipelines.recipe.schema.place import ClusterSection

START_SECONDS = 30.0  # until a head that has just started knows its nodes
STAND_IN = "CASEMATE_TEST_GPU"
"""For tests on machines without GPUs: the torch device that stands in for the GPU of a worker.

Results name the device that computed them: a stand-in is never recorded as a GPU.
"""


class DeviceError(RuntimeError):
    """A worker whose GPU cannot be used; another machine may have one that can."""


def worker_device() -> str:
    """The device of this worker, `cpu` or `cuda`; raises if torch cannot use the GPU it was given.

    Outside of Ray workers it is the CPU.
    """
    given = ray.get_gpu_ids() if ray.is_initialized() else []
    if not given:
        return "cpu"
    if stand_in := os.environ.get(STAND_IN):
        return stand_in
    import torch

    if torch.cuda.is_available():
        return "cuda"
    raise DeviceError(
        f"{_node()}: Ray gave this worker GPU {', '.join(map(str, given))}, but torch "
        f"{torch.__version__} cannot use it ({_cuda_error(torch)}); install its driver and a CUDA "
        "build of torch there, or start its Ray with --num-gpus=0"
    )


def check_device(expected: str) -> None:
    """Refuse to compute on another device than the one that results will name."""
    if (found := worker_device()) != expected:
        raise DeviceError(
            f"{_node()}: computes on {found}, the results are those of {expected}; "
            "start again with --force to compute all of them alike"
        )


def device_name(device: str) -> str:
    """The device in words, e.g. `cuda (NVIDIA A100-SXM4-40GB)`."""
    if device != "cuda":
        return device
    import torch

    return f"{device} ({torch.cuda.get_device_name()})"


def total_gpus() -> float:
    """GPUs of the connected cluster."""
    return float(ray.cluster_resources().get("GPU", 0))


def gpus_at(address: str) -> float:
    """GPUs of a cluster by the address of its head or its dashboard; nothing is started there."""
    from ray.util.state import list_nodes

    check_reachable(address, key="--address")
    deadline = time.monotonic() + START_SECONDS
    nodes: list[Any] = []
    try:
        while not nodes and time.monotonic() < deadline:  # a head that starts has none yet
            nodes = list_nodes(address, filters=[("state", "=", "ALIVE")], timeout=10)
            time.sleep(0 if nodes else 0.5)
    except AuthenticationError as error:
        raise refused_token("--address", address) from error
    except Exception as error:  # the state API raises errors of requests, of Ray and its own
        raise CasemateError("--address", address, f"gives no answer: {first_line(error)}") from None
    return sum(float((node.resources_total or {}).get("GPU", 0)) for node in nodes)


def process_group_backend(cluster: "ClusterSection") -> str:
    """The library by which train workers talk to each other: that of their devices."""
    on_gpus = cluster.gpus_per_train_worker and not os.environ.get(STAND_IN)
    return "nccl" if on_gpus else "gloo"


def _node() -> str:
    return f"node {ray.util.get_node_ip_address()} ({platform.node()})"


def _cuda_error(torch: Any) -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return first_line(error)
    return "no reason given"
