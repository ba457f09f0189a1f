"""Predictions of one image under many masks, for any model and any masks."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from components.core.evaluations import EVALUATIONS
from components.core.transfers import sent
from components.core.types import Images
from components.models.logits import check_logits
from components.models.pixels import PixelModel

MASKS_AT_ONCE = 64  # all masks at once would need too much memory


class Masks(Protocol):
    """The visible pixels of K masks: a (K, H, W) bool tensor, or its rows on demand."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Tensor, /) -> Tensor: ...


def spans(masks: Masks, *, device: torch.device | str = "cpu") -> tuple[Tensor, ...]:
    """Indices of all masks, in spans of limited memory.

    Write results per span into a preallocated tensor: small tensors that are kept would fragment
    the memory that masks have freed.
    """
    return torch.split(torch.arange(len(masks), device=device), MASKS_AT_ONCE)


def group_by_tokens(
    model: PixelModel, masks: Masks, *, device: torch.device | str = "cpu"
) -> list[Tensor]:
    """Indices of the masks that keep equally many tokens: each group gives dense batches."""
    counts = torch.empty(len(masks), dtype=torch.int64, device=device)
    for span in spans(masks, device=device):
        counts[span] = model.num_kept(masks[span])
    return [(counts == count).nonzero()[:, 0] for count in sorted(set(counts.tolist()))]


def dense_chunks(model: PixelModel, masks: Masks, *, micro_batch: int) -> list[Tensor]:
    """Batches of masks; they depend on model, masks and settings only."""
    groups = group_by_tokens(model, masks)
    return [part for group in groups for part in torch.split(group, micro_batch)]


@torch.inference_mode()
def masked_predictions(
    model: PixelModel,
    images: Images,
    visible: Masks,
    *,
    chunks: list[Tensor],
    item_ids: Sequence[str] | None = None,
) -> Tensor:
    """(B, Q) argmax under each of the Q masks, ties to the lowest class.

    Each image is processed by itself, in the given chunks: a prediction does not depend on the
    other images of a worker. An error names the item if logits are not finite.
    """
    if model.training:
        raise ValueError("votes need eval mode: train-mode layers mix rows of a batch")
    device = model.mean.device
    votes = torch.empty(images.shape[0], len(visible), dtype=torch.int64, device=device)
    finite = torch.ones(len(images), dtype=torch.bool, device=device)
    places = [sent(chunk, device) for chunk in chunks]
    for row, image in enumerate(sent(images, device)):
        for chunk, place in zip(chunks, places, strict=True):
            shown = sent(visible[chunk], device)
            logits = model.forward_ablated(image.expand(len(chunk), -1, -1, -1), shown)
            EVALUATIONS.add(len(chunk))
            votes[row, place] = logits.argmax(dim=1)
            finite[row] &= logits.isfinite().all()
    found = finite.cpu()[:, None]  # the device is waited for once, not after every pass
    check_logits(
        torch.where(found, 0.0, torch.nan), item_ids or [str(n) for n in range(len(found))]
    )
    return votes.cpu()
