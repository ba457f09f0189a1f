"""Copies to and on a device that do not wait for it."""

import torch
from torch import Tensor


def sent(values: Tensor, device: torch.device | str) -> Tensor:
    """`values` on `device`; to a GPU from pinned memory, while the host goes on.

    torch keeps the pinned memory until the copy is done, so two batches may be on their way.
    """
    if torch.device(device).type == "cuda" and values.device.type == "cpu":
        values = values.pin_memory()  # no copy where it is pinned already
    return values.to(device, non_blocking=True)


def put_rows(target: Tensor, mask: Tensor, source: Tensor) -> None:
    """target[mask] = source[mask] for a (B,) bool mask, in place, without waiting for a GPU."""
    if target.device.type == "cpu":  # usually few rows
        rows = mask.nonzero().squeeze(1)
        target.index_copy_(0, rows, source.index_select(0, rows))
    else:
        wide = mask.view(-1, *[1] * (target.dim() - 1))
        target.copy_(torch.where(wide, source, target))
