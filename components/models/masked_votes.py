"""Predictions of one image under many masks, for any model and any masks."""

from typing import Protocol

import torch
from torch import Tensor

from components.core.types import Images
from components.models.pixels import PixelModel

MASKS_AT_ONCE = 64  # the masks of all squares together would fill the memory


class Masks(Protocol):
    """The visible pixels of K masks: a (K, H, W) bool tensor, or what makes its rows when asked."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Tensor, /) -> Tensor: ...


def spans(masks: Masks, *, device: torch.device | str = "cpu") -> tuple[Tensor, ...]:
    """The numbers of all masks, as many at once as memory is taken for.

    What is found per span belongs into a tensor made before: small pieces that are kept lie in the
    gaps that masks leave, and the allocator could not use those again.
    """
    return torch.split(torch.arange(len(masks), device=device), MASKS_AT_ONCE)


def group_by_tokens(
    model: PixelModel, masks: Masks, *, device: torch.device | str = "cpu"
) -> list[Tensor]:
    """Indices of the masks that keep equally many tokens: each group makes dense batches."""
    counts = torch.empty(len(masks), dtype=torch.int64, device=device)
    for span in spans(masks, device=device):
        counts[span] = model.num_kept(masks[span])
    return [(counts == count).nonzero()[:, 0] for count in sorted(set(counts.tolist()))]


def dense_chunks(model: PixelModel, masks: Masks, *, micro_batch: int) -> list[Tensor]:
    """The batches in which masks are asked: they follow from model, masks and settings alone."""
    groups = group_by_tokens(model, masks)
    return [part for group in groups for part in torch.split(group, micro_batch)]


@torch.inference_mode()
def masked_predictions(
    model: PixelModel, images: Images, visible: Masks, *, chunks: list[Tensor]
) -> Tensor:
    """(B, Q) argmax under each of the Q masks, ties to the lowest class.

    Each image is asked by itself, in the given chunks: a prediction never depends on which other
    images a worker happens to hold.
    """
    if model.training:
        raise ValueError("votes need eval mode: train-mode layers mix rows of a batch")
    device = model.mean.device
    votes = torch.empty(images.shape[0], len(visible), dtype=torch.int64)
    for row, image in enumerate(images.to(device)):
        for chunk in chunks:
            logits = model.forward_ablated(
                image.expand(len(chunk), -1, -1, -1), visible[chunk].to(device)
            )
            votes[row, chunk] = logits.argmax(dim=1).cpu()
    return votes
