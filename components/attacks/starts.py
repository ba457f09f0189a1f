"""Random starts that belong to items: the same in any batch, order or worker."""

from collections.abc import Sequence

import torch
from torch import Tensor

from components.attacks.interface import Items
from components.core.seeding import generator_for
from components.core.types import Images


def random_starts(
    item_ids: Sequence[str], shape: Sequence[int], *, run_seed: int, stream: str
) -> Tensor:
    """(B, *shape) float32 uniform on [-1, 1], each row a function of the seed and its item id."""
    starts = torch.empty(len(item_ids), *shape)
    for row, item_id in zip(starts, item_ids, strict=True):
        row.uniform_(-1, 1, generator=generator_for(run_seed, stream, item_id))
    return starts


def normal_starts(
    item_ids: Sequence[str], shape: Sequence[int], *, run_seed: int, stream: str
) -> Tensor:
    """(B, *shape) float32 standard normals, otherwise as `random_starts`."""
    starts = torch.empty(len(item_ids), *shape)
    for row, item_id in zip(starts, item_ids, strict=True):
        row.normal_(generator=generator_for(run_seed, stream, item_id))
    return starts


def random_point(items: Items, *, norm: str, eps: float, stream: str) -> Images:
    """A start for each item, still to be projected: uniform in the l-inf ball, or beyond the l2
    sphere in a uniformly random direction, so that the projection lands on the sphere.
    """
    if norm == "l2":
        return items.x + eps * items.normal(stream)
    return items.x + eps * (2 * items.uniform(stream) - 1)


def random_corner(items: Items, *, eps: float, stream: str) -> Images:
    """A start for each item, still to be projected: a random corner of the l-inf ball (the start of
    Sriramanan et al. 2020, Algorithm 1); in l2 the projection pulls it onto the sphere.
    """
    return items.x + eps * (2 * items.uniform(stream) - 1).sign()


def restart_stream(attack: str, restart: int) -> str:
    """The stream of one start; that of the first does not depend on the number of restarts."""
    return attack if restart == 0 else f"{attack}-{restart}"
