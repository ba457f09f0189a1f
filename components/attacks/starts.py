"""Random starts that belong to items: any batch, order or worker sees the same ones."""

from collections.abc import Sequence

import torch
from torch import Tensor

from components.core.seeding import generator_for


def random_starts(
    item_ids: Sequence[str], shape: Sequence[int], *, run_seed: int, stream: str
) -> Tensor:
    """(B, *shape) float32 uniform on [-1, 1], each row a function of its item id alone."""
    rows = [
        torch.rand(tuple(shape), generator=generator_for(run_seed, stream, item_id))
        for item_id in item_ids
    ]
    return 2 * torch.stack(rows) - 1
