"""Interface of an objective: everything the trainer uses.

A step is `with objective.perturbed(wrapped, bare, batch) as batch:`, inside it `loss` and the
backward pass, after it the optimiser.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from components.core.settings import plain
from components.core.types import Images, Labels, Logits
from components.models.pixels import PixelModel
from components.train.objectives.leak import LeakDetector


@dataclass(frozen=True, slots=True)
class Batch:
    """Part of one global batch; randomness is drawn by (seed, epoch, item) or by (..., step)."""

    images: Images
    labels: Labels
    item_ids: tuple[str, ...]
    seed: int
    epoch: int
    step: int  # step of the epoch; equal on all workers that share a global batch
    targets: Tensor | None = None  # (B, K) float: mixed, already smoothed labels; None: `labels`
    num_steps: int | None = None  # steps of the epoch; for values that change with the step
    adversarial: Images | None = None  # already crafted by a wrapper
    start_noise: Tensor | None = None  # of `Objective.start_noise`, drawn ahead; None: not yet

    @property
    def hard_labels(self) -> Labels:
        """The labels for attacks and accuracy: the likeliest class, ties to the lowest."""
        return self.labels if self.targets is None else self.targets.argmax(dim=1)


@dataclass(frozen=True, slots=True)
class LossOut:
    """The loss to minimise, with logits (detached) and metrics of the step.

    `logits` are those that the training accuracy counts: of clean images where the loss contains
    them, else of the images that it was computed on; None: the model is not a classifier.
    `metrics` are means over the items of the batch and may be missing from some steps. As float64
    tensors they stay on the device, and the host need not wait for them.
    """

    loss: Tensor
    logits: Logits | None = None
    adversarial_logits: Logits | None = None
    metrics: Mapping[str, float | Tensor] = field(default_factory=dict)


class Objective:
    """Base of all objectives; everything but `loss` has a default.

    `wrapped` may synchronise gradients across workers; `bare` is the same model without that.
    `loss` calls `wrapped` exactly once, and before any graph is built through `bare`: workers wait
    for each other in that call, and it may overwrite buffers that an earlier graph has saved.
    """

    has_state: bool = False
    """Whether it changes the model other than by gradients, so that `state` is saved."""
    classifies: bool = True
    """Whether the model has classes, so that it can be attacked."""
    validation_metric: str = "val_accuracy"
    """Name in histories of the mean of `validation_scores` over the validation items."""
    lower_is_better: bool = False
    """Direction of the validation metric."""

    def __init__(self, settings: Any, *, label_smoothing: float) -> None:
        self.settings, self.label_smoothing = settings, label_smoothing

    @classmethod
    def build(cls, settings: Any, *, label_smoothing: float, start: str | None) -> "Objective":
        """The objective of a recipe; `start` names denoiser weights that the model starts from."""
        return cls(settings, label_smoothing=label_smoothing)

    @classmethod
    def trained_for(cls, settings: Any, *, start: str | None) -> dict[str, Any]:
        """The record of the training in a saved model: settings without paths."""
        values: dict[str, Any] = plain(settings)
        return values

    def loss(self, wrapped: nn.Module, bare: nn.Module, batch: Batch) -> LossOut:
        """The loss of a batch, with a graph."""
        raise NotImplementedError

    def perturbed(
        self, wrapped: nn.Module, bare: nn.Module, batch: Batch
    ) -> AbstractContextManager[Batch]:
        """Context of a step's loss and backward pass; yields the batch to compute them on.

        An objective may move the weights inside it.
        """
        return nullcontext(batch)

    # Training attack

    @property
    def eps(self) -> float | None:
        """Final epsilon of the training attack; None: there is no attack."""
        return None

    def eps_at(self, epoch: int) -> float | None:
        """Epsilon of the training attack in an epoch; None: there is no attack."""
        return None

    def start_noise(
        self, item_ids: Sequence[str], shape: Sequence[int], *, run_seed: int, epoch: int
    ) -> Tensor | None:
        """(B, *shape) random numbers that the training attack of a batch needs, on the CPU; None:
        no attack. A pure function, safe in any thread.
        """
        return None

    def craft(self, bare: nn.Module, batch: Batch) -> Images:
        """Adversarial images for the current weights; without an attack, the images themselves."""
        return batch.images

    def without_warmup(self, eps: float) -> "Objective":
        """An objective whose `craft` has another epsilon that holds from the first step on."""
        raise ValueError(f"{type(self).__name__} has no training attack")

    def leak_detector(self) -> LeakDetector | None:
        """The detector that stops a training with label leaking; None: not monitored."""
        return None

    # Validation

    def validation_logits(self, bare: nn.Module, batch: Batch) -> Logits:
        """Logits of the images that the model is trained for: whole, ablated or noisy."""
        logits: Logits = bare(batch.images)
        return logits

    def validation_scores(self, bare: PixelModel, batch: Batch) -> Tensor:
        """(B,) value of the validation metric for each item."""
        return self.validation_logits(bare, batch).argmax(dim=1) == batch.labels

    # State of the model between epochs

    def prepare(self, bare: nn.Module) -> None:
        """Called once, when the model is on its device, before it is wrapped or loads weights."""

    def state(self) -> dict[str, Tensor] | None:
        """State that a checkpoint stores besides the weights."""
        return None

    def restore(self, state: Any) -> None:
        """Continue from `state`."""

    def searches(self, epoch: int) -> bool:
        """Whether `begin_epoch` is called, with the batches of the epoch."""
        return False

    def begin_epoch(self, bare: nn.Module, epoch: int, batches: Iterable[Batch]) -> None:
        """Called before the steps of an epoch; `batches` are global, equal on all workers."""

    def trains(self, epoch: int) -> bool:
        """Whether the epoch has training steps."""
        return True

    def finish(self, bare: nn.Module) -> None:
        """Called once on a copy of the selected model: leaves an ordinary model."""

    def not_shardable(self, model: PixelModel) -> str | None:
        """Why the objective cannot be trained with sharded weights; None: it can."""
        return None


def cross_entropy(logits: Logits, batch: Batch, *, label_smoothing: float) -> Tensor:
    """Mean cross-entropy with the batch's targets, or with its labels, smoothed.

    Targets from mixing are already smoothed; they are not smoothed again.
    """
    if batch.targets is not None:
        return F.cross_entropy(logits, batch.targets)
    return F.cross_entropy(logits, batch.labels, label_smoothing=label_smoothing)
