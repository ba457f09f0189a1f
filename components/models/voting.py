"""Base classifiers that vote: one prediction for every column ablation of an image."""

from collections import defaultdict
from functools import lru_cache

import torch
from torch import Tensor

from components.core.types import Images
from components.data.ablation import column_mask, column_starts
from components.models.pixels import PixelModel


def column_masks(model: PixelModel, *, band: int, stride: int) -> Tensor:
    """(K, H, W) visible pixels of every column ablation, in order of their starts."""
    side = model.spec.image_size
    columns = torch.stack([column_mask(side, q, band) for q in column_starts(side, stride)])
    return columns[:, None, :].expand(-1, side, -1)


def group_by_tokens(model: PixelModel, masks: Tensor) -> list[Tensor]:
    """Indices of the ablations that keep equally many tokens: each group makes dense batches."""
    groups: dict[int, list[int]] = defaultdict(list)
    for index, mask in enumerate(masks):
        groups[model.num_kept(mask)].append(index)
    return [torch.tensor(groups[count]) for count in sorted(groups)]


@lru_cache(maxsize=2)  # holds its models: no more than a worker uses in turn
def _plan(model: PixelModel, band: int, stride: int, chunk: int) -> tuple[Tensor, list[Tensor]]:
    masks = column_masks(model, band=band, stride=stride)
    groups = group_by_tokens(model, masks)
    return masks, [part for group in groups for part in torch.split(group, chunk)]


@torch.inference_mode()
def column_predictions(
    model: PixelModel, images: Images, *, band: int, stride: int, micro_batch: int
) -> Tensor:
    """(B, K) argmax of every ablation, ties to the lowest class.

    Each image is voted on by itself, in chunks whose shapes follow from the settings alone: a vote
    never depends on which other images a worker happens to hold.
    """
    if model.training:
        raise ValueError("votes need eval mode: train-mode layers mix rows of a batch")
    masks, chunks = _plan(model, band, stride, micro_batch)
    device = model.mean.device
    votes = torch.empty(images.shape[0], masks.shape[0], dtype=torch.int64)
    for row, image in enumerate(images.to(device)):
        for chunk in chunks:
            visible = masks[chunk].to(device)
            logits = model.forward_ablated(image.expand(len(chunk), -1, -1, -1), visible)
            votes[row, chunk] = logits.argmax(dim=1).cpu()
    return votes
