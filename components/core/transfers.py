"""Copies between host and device that do not wait for the device."""

import torch
from torch import Tensor


def sent(values: Tensor, device: torch.device | str) -> Tensor:
    """`values` on `device`; to a GPU from pinned memory, while the host goes on.

    torch keeps the pinned memory until the copy is done, so two batches may be on their way.
    """
    if torch.device(device).type == "cuda" and values.device.type == "cpu":
        values = values.pin_memory()  # no copy where it is pinned already
    return values.to(device, non_blocking=True)
