"""The process group of train workers: formed when each of them has a device that it can use.

Light to import: Ray's controller, which has the workers form it, loads no torch. Ray's own
`TorchConfig` would make it do so for each training: two seconds of processor time.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.train.backend import Backend, BackendConfig
from ray.train.constants import DEFAULT_TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S as SHUTDOWN_SECONDS
from ray.train.v2._internal.util import TrainingFramework
from ray.util import remove_placement_group

from pipelines.runtime.devices import worker_device


class CheckedBackend(Backend):  # type: ignore[misc]  # Ray has no types
    """Ray's process group; a worker without its GPU says so before, as NCCL names no machine."""

    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: "ProcessGroup") -> None:
        try:
            worker_group.execute(worker_device)
            address, port = worker_group.execute_single(0, free_address)
            size = len(worker_group)
            joined = [
                worker_group.execute_single_async(
                    rank, join, backend_config.backend, address, port, rank, size
                )
                for rank in range(size)
            ]
            ray.get(joined)
        except Exception:
            # Ray ends the training, but keeps its CPUs and GPUs for as long as the driver lives.
            held = worker_group.get_worker_group_state().placement_group_handle
            remove_placement_group(held.placement_group)
            raise

    def on_shutdown(self, worker_group: Any, backend_config: "ProcessGroup") -> None:
        left = worker_group.execute_async(leave, several=len(worker_group) > 1)
        with suppress(GetTimeoutError):  # the workers end in any case
            ray.get(left, timeout=SHUTDOWN_SECONDS)


@dataclass
class ProcessGroup(BackendConfig):  # type: ignore[misc]
    """Settings of `CheckedBackend`."""

    backend: str  # `nccl` or `gloo`

    @property
    def backend_cls(self) -> type[CheckedBackend]:
        return CheckedBackend

    @property
    def train_func_context(self) -> Any:
        return on_own_device

    @property
    def framework(self) -> TrainingFramework:
        return TrainingFramework.TORCH

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def free_address() -> tuple[str, int]:
    """An address of this worker's machine at which the others can reach it."""
    from ray.train._internal.utils import get_address_and_port

    address, port = get_address_and_port()
    return address, port


def join(backend: str, address: str, port: int, rank: int, size: int) -> None:
    """Enter the process group; returns when all workers have."""
    from ray.train.torch import config

    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    config._set_torch_distributed_env_vars()
    config._setup_torch_process_group(backend, rank, size, "env://")


def leave(*, several: bool) -> None:
    from ray.train.torch import config

    config._shutdown_torch(destroy_process_group=several)


@contextmanager
def on_own_device() -> Iterator[None]:
    """Around the function of a worker: its GPU, if it has one, is torch's own default."""
    from ray.train.torch.config import TorchConfigContextManager

    with TorchConfigContextManager():
        yield
