"""Base classifiers that vote: one prediction for every ablation of an image."""

from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

from components.core.types import Images
from components.data.ablation import Ablations
from components.models.masked_votes import dense_chunks, group_by_tokens, masked_predictions
from components.models.pixels import PixelModel

__all__ = ["ablation_predictions", "column_masks", "column_predictions", "group_by_tokens"]


def ablation_predictions(
    model: PixelModel,
    images: Images,
    ablations: Ablations,
    *,
    micro_batch: int,
    order: Sequence[int] | None = None,
) -> Tensor:
    """(B, K) argmax of every ablation, ties to the lowest class.

    `order` asks only these ablations, by index: then (B, len(order)), in that order. A vote never
    depends on which other images a worker happens to hold.
    """
    asked = None if order is None else tuple(order)
    masks, chunks = _plan(model, ablations, micro_batch, asked)
    return masked_predictions(model, images, masks, chunks=chunks)


def column_predictions(
    model: PixelModel, images: Images, *, band: int, stride: int, micro_batch: int
) -> Tensor:
    """(B, K) votes of column ablations."""
    ablations = _columns(model, band=band, stride=stride)
    return ablation_predictions(model, images, ablations, micro_batch=micro_batch)


def column_masks(model: PixelModel, *, band: int, stride: int) -> Tensor:
    """(K, H, W) visible pixels of every column ablation, in order of their starts."""
    return _columns(model, band=band, stride=stride).masks()


def _columns(model: PixelModel, *, band: int, stride: int) -> Ablations:
    side = model.spec.image_size
    return Ablations(kind="columns", image_size=(side, side), band=band, stride=stride)


@lru_cache(maxsize=16)  # holds its models; early stops ask for parts in turn
def _plan(
    model: PixelModel, ablations: Ablations, micro_batch: int, order: tuple[int, ...] | None
) -> tuple[Tensor, list[Tensor]]:
    masks = ablations.masks()
    if order is not None:
        masks = masks[list(order)]
    return masks, dense_chunks(model, masks, micro_batch=micro_batch)
