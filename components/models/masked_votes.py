"""Predictions of one image under many masks, for any model and any masks."""

from collections import defaultdict

import torch
from torch import Tensor

from components.core.types import Images
from components.models.pixels import PixelModel


def group_by_tokens(model: PixelModel, masks: Tensor) -> list[Tensor]:
    """Indices of the masks that keep equally many tokens: each group makes dense batches."""
    groups: dict[int, list[int]] = defaultdict(list)
    for index, mask in enumerate(masks):
        groups[model.num_kept(mask)].append(index)
    return [torch.tensor(groups[count]) for count in sorted(groups)]


def dense_chunks(model: PixelModel, masks: Tensor, *, micro_batch: int) -> list[Tensor]:
    """The batches in which masks are asked: they follow from model, masks and settings alone."""
    groups = group_by_tokens(model, masks)
    return [part for group in groups for part in torch.split(group, micro_batch)]


@torch.inference_mode()
def masked_predictions(
    model: PixelModel, images: Images, visible: Tensor, *, chunks: list[Tensor]
) -> Tensor:
    """(B, Q) argmax under each of the (Q, H, W) masks, ties to the lowest class.

    Each image is asked by itself, in the given chunks: a prediction never depends on which other
    images a worker happens to hold.
    """
    if model.training:
        raise ValueError("votes need eval mode: train-mode layers mix rows of a batch")
    device = model.mean.device
    votes = torch.empty(images.shape[0], visible.shape[0], dtype=torch.int64)
    for row, image in enumerate(images.to(device)):
        for chunk in chunks:
            logits = model.forward_ablated(
                image.expand(len(chunk), -1, -1, -1), visible[chunk].to(device)
            )
            votes[row, chunk] = logits.argmax(dim=1).cpu()
    return votes
