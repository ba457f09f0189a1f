"""The interface of an objective: the trainer calls it, back-propagates, and knows nothing else."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn
from torch.nn import functional as F

from components.core.types import Images, Labels, Logits


@dataclass(frozen=True, slots=True)
class Batch:
    """A part of one global batch; randomness is drawn by (seed, epoch, item) or by (..., step)."""

    images: Images
    labels: Labels
    item_ids: tuple[str, ...]
    seed: int
    epoch: int
    step: int  # of the epoch; equal on all workers that share a global batch
    targets: Tensor | None = None  # (B, K) float: mixed, already smoothed labels; None: `labels`

    @property
    def hard_labels(self) -> Labels:
        """What attacks ascend and accuracy counts: the likeliest class, ties to the lowest."""
        return self.labels if self.targets is None else self.targets.argmax(dim=1)


@dataclass(frozen=True, slots=True)
class LossOut:
    """The loss to minimise and the logits it was computed on, for the training accuracy."""

    loss: Tensor
    logits: Logits


class Objective(Protocol):
    """`wrapped` may synchronise gradients across workers; `bare` is the same model without that."""

    def loss(self, wrapped: nn.Module, bare: nn.Module, batch: Batch) -> LossOut: ...

    def validation_logits(self, bare: nn.Module, batch: Batch) -> Logits:
        """Logits on what the model is meant to see: whole, ablated or noisy images."""
        ...


def cross_entropy(logits: Logits, batch: Batch, *, label_smoothing: float) -> Tensor:
    """Mean cross-entropy with the batch's targets, or with its labels, smoothed.

    Targets come smoothed from mixing: smoothing them again would count twice.
    """
    if batch.targets is not None:
        return F.cross_entropy(logits, batch.targets)
    return F.cross_entropy(logits, batch.labels, label_smoothing=label_smoothing)
