"""The interface of an objective: the trainer calls it, back-propagates, and knows nothing else.

A step is `with perturbed(objective, wrapped, bare, batch) as batch:`, inside it `loss` and the
backward pass, after it the optimiser.
"""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor, nn
from torch.nn import functional as F

from components.core.types import Images, Labels, Logits
from components.models.pixels import PixelModel


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
    num_steps: int | None = None  # of the epoch; only what changes from step to step needs it
    adversarial: Images | None = None  # made already, by a wrapper that needed them first

    @property
    def hard_labels(self) -> Labels:
        """What attacks ascend and accuracy counts: the likeliest class, ties to the lowest."""
        return self.labels if self.targets is None else self.targets.argmax(dim=1)


@dataclass(frozen=True, slots=True)
class LossOut:
    """The loss to minimise, and what the step learned on its way; logits are detached.

    `logits` are those that the training accuracy counts: of clean images where the loss contains
    them, else of the images that it was computed on; None: the model tells no classes apart.
    `metrics` are means over the items of the batch and may be missing from some steps.
    """

    loss: Tensor
    logits: Logits | None = None
    adversarial_logits: Logits | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class Objective(Protocol):
    """`wrapped` may synchronise gradients across workers; `bare` is the same model without that.

    `loss` calls `wrapped` exactly once, and before any graph is built through `bare`: workers wait
    for each other in that call, and it may overwrite buffers that an earlier graph has saved.
    """

    def loss(self, wrapped: nn.Module, bare: nn.Module, batch: Batch) -> LossOut: ...

    def validation_logits(self, bare: nn.Module, batch: Batch) -> Logits:
        """Logits on what the model is meant to see: whole, ablated or noisy images."""
        logits: Logits = bare(batch.images)
        return logits

    def eps_at(self, epoch: int) -> float | None:
        """The budget of the training attack; None: there is no attack."""
        return None


@runtime_checkable
class EstimatingObjective(Objective, Protocol):
    """An objective of a model that estimates images; its validation figure is an error."""

    def validation_errors(self, bare: PixelModel, batch: Batch) -> Tensor:
        """(B,) mean squared error of each item, in pixels of [0, 1]; the lower the better."""
        ...


@runtime_checkable
class StatefulObjective(Objective, Protocol):
    """An objective that changes the model by other means than gradients, between epochs."""

    def prepare(self, bare: nn.Module) -> None:
        """Once, when the model is on its device, before it is wrapped or gets saved weights."""
        ...

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must keep besides the weights."""
        ...

    def restore(self, state: Mapping[str, Tensor]) -> None: ...

    def begin_epoch(self, bare: nn.Module, epoch: int, batches: Iterable[Batch]) -> None:
        """Before the steps of every epoch; `batches` are the global ones, equal on all workers."""
        ...

    def trains(self, epoch: int) -> bool:
        """Whether the epoch has steps at all."""
        ...

    def finish(self, bare: nn.Module) -> None:
        """Once, after the last epoch: leaves an ordinary model."""
        ...


@runtime_checkable
class PerturbingObjective(Objective, Protocol):
    """An objective whose loss and gradient are taken at other weights than those of the model."""

    def perturbed(
        self, wrapped: nn.Module, bare: nn.Module, batch: Batch
    ) -> AbstractContextManager[Batch]: ...


def perturbed(
    objective: Objective, wrapped: nn.Module, bare: nn.Module, batch: Batch
) -> AbstractContextManager[Batch]:
    """The context of a step's loss and backward pass; it gives the batch to compute them on."""
    if isinstance(objective, PerturbingObjective):
        return objective.perturbed(wrapped, bare, batch)
    return nullcontext(batch)


def cross_entropy(logits: Logits, batch: Batch, *, label_smoothing: float) -> Tensor:
    """Mean cross-entropy with the batch's targets, or with its labels, smoothed.

    Targets come smoothed from mixing: smoothing them again would count twice.
    """
    if batch.targets is not None:
        return F.cross_entropy(logits, batch.targets)
    return F.cross_entropy(logits, batch.labels, label_smoothing=label_smoothing)
