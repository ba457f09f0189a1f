"""Several copies of an item in one batch, each augmented on its own.

Both kinds reorder the permutation of an epoch, a function of (seed, epoch), independent of workers:
any worker may read any contiguous share of a batch. Copies of an item are not neighbours, so that
mixing, which pairs neighbours, gets different items.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from components.core.errors import CasemateError


def copy_names(item_ids: Sequence[str], repeats: Sequence[int] | None) -> tuple[str, ...]:
    """Addresses of draws: copy 0 has that of its item, further copies have their own.

    Draws per item (augmentation, noise, starts of attacks) are per copy under these names.
    """
    if repeats is None:
        return tuple(item_ids)
    pairs = zip(item_ids, repeats, strict=True)
    return tuple(f"{item_id}#copy{copy}" if copy else item_id for item_id, copy in pairs)


def repeat_augment_indices(
    order: Tensor, *, num_repeats: int, batch_size: int
) -> tuple[Tensor, Tensor]:
    """Item and copy index of every sample: `num_repeats` copies of as many items as an epoch holds.

    The epoch keeps its length, so about 1 / `num_repeats` of the items appear (Hoffer et al. 2020;
    the sampler of DeiT, Touvron et al. 2021, sec. 6). Within a batch first copies come first.
    """
    if num_repeats < 1:
        raise CasemateError("train.augment.copies", num_repeats, "must be at least 1")
    count = len(order)
    items = order.repeat_interleave(num_repeats)[:count]
    copies = torch.arange(num_repeats).repeat(count)[:count]
    batches = torch.arange(count) // batch_size
    apart = torch.argsort(batches * num_repeats + copies, stable=True)
    return items[apart], copies[apart]


def split_indices(order: Tensor, *, num_splits: int, batch_size: int) -> tuple[Tensor, Tensor]:
    """Item and copy index of every sample: all copies of every item; copy 0 stays clean.

    A batch holds `batch_size` / `num_splits` items and, as with timm's `aug_splits`, one block per
    copy; an epoch is `num_splits` times as long. `Augmentation.clean_copy` skips copy 0.
    """
    if num_splits < 1 or batch_size % num_splits:
        remedy = f"is not a multiple of {num_splits} copies per item"
        raise CasemateError("train.batch_size", batch_size, remedy)
    parts = torch.split(order, batch_size // num_splits)
    copies = [torch.arange(num_splits).repeat_interleave(len(part)) for part in parts]
    return torch.cat([part.repeat(num_splits) for part in parts]), torch.cat(copies)
