"""Random crops and flips whose randomness belongs to the item, not to its batch or worker.

Zero-padded crops and mirror flips are the usual augmentation of small images
(He et al. 2016, arXiv:1512.03385, sec. 4.2).
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from components.core.types import Images


def augment_batch(
    images: Images,
    item_ids: Sequence[str],
    *,
    run_seed: int,
    epoch: int,
    pad_crop: int,
    flip: bool,
) -> Images:
    """Each image moved by up to `pad_crop` pixels per axis over black, and mirrored half the time.

    An item's change depends on (run_seed, epoch, item id) alone; `pad_crop=0` keeps positions.
    """
    if pad_crop < 0:
        raise ValueError(f"pad_crop must be >= 0, got {pad_crop}")
    if len(item_ids) != len(images):
        raise ValueError(f"{len(item_ids)} item ids for {len(images)} images")
    if not len(images) or not (pad_crop or flip):
        return images
    draws = item_draws(item_ids, run_seed=run_seed, epoch=epoch).to(images.device)
    if pad_crop:
        side = 2 * pad_crop + 1  # 32-bit draws: the bias of the remainder is below side / 2**32
        images = _crop(images, top=draws[:, 0] % side, left=draws[:, 1] % side, margin=pad_crop)
    if flip:
        mirrored = (draws[:, 2] % 2 == 1)[:, None, None, None]
        images = torch.where(mirrored, images.flip(-1), images)
    return images


def item_draws(item_ids: Sequence[str], *, run_seed: int, epoch: int) -> Tensor:
    """(B, 3) int64: three independent uniform 32-bit integers per item."""
    prefix = hashlib.sha256(f"augment1|{run_seed}|{epoch}|".encode())
    rows = bytearray()
    for item_id in item_ids:
        state = prefix.copy()
        state.update(item_id.encode())
        rows += state.digest()[:12]
    words = np.frombuffer(bytes(rows), dtype="<u4").astype(np.int64)
    return torch.from_numpy(words.reshape(-1, 3))


def _crop(images: Images, *, top: Tensor, left: Tensor, margin: int) -> Images:
    """Windows of the native size out of zero-padded images, one corner per image."""
    height, width = images.shape[-2:]
    padded = F.pad(images, [margin] * 4)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # (B, C, 2m+1, 2m+1, H, W), a view
    rows = torch.arange(len(images), device=images.device)
    return windows[rows, :, top, left]
