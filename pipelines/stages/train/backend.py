"""The process group of train workers: formed when each of them has a device that it can use."""

from typing import Any

from ray.train.torch.config import TorchConfig, _TorchBackend
from ray.util import remove_placement_group

from pipelines.runtime.devices import worker_device


class CheckedBackend(_TorchBackend):  # type: ignore[misc]  # Ray has no types
    """Ray's process group; a worker without its GPU says so before, as NCCL names no machine."""

    def on_start(self, worker_group: Any, backend_config: TorchConfig) -> None:
        try:
            worker_group.execute(worker_device)
            super().on_start(worker_group, backend_config)
        except Exception:
            # Ray ends the training, but keeps its CPUs and GPUs for as long as the driver lives.
            held = worker_group.get_worker_group_state().placement_group_handle
            remove_placement_group(held.placement_group)
            raise


class CheckedTorchConfig(TorchConfig):  # type: ignore[misc]
    """Settings of `CheckedBackend`."""

    @property
    def backend_cls(self) -> type[CheckedBackend]:
        return CheckedBackend
