"""The process group of train workers: formed when each of them has a device that it can use."""

from typing import Any

from ray.train.torch.config import TorchConfig, _TorchBackend

from pipelines.runtime.devices import worker_device


class CheckedBackend(_TorchBackend):  # type: ignore[misc]  # Ray has no types
    """Ray's process group; a worker without its GPU says so before, as NCCL names no machine."""

    def on_start(self, worker_group: Any, backend_config: TorchConfig) -> None:
        worker_group.execute(worker_device)
        super().on_start(worker_group, backend_config)


class CheckedTorchConfig(TorchConfig):  # type: ignore[misc]
    """Settings of `CheckedBackend`."""

    @property
    def backend_cls(self) -> type[CheckedBackend]:
        return CheckedBackend
