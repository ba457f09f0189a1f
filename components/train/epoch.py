"""The optimiser, the step and the epoch; one worker's part of it."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from timm.optim import param_groups_weight_decay
from torch import nn

from components.core.seeding import generator_for
from components.data.augment import Augmentation, Mixing
from components.data.augment.repeats import copy_names
from components.models.pixels import PixelModel
from components.train.feed import BatchPlan, Feed, Feeding, Share, TrainingSet, Worker
from components.train.objectives.base import Batch, Objective
from components.train.schedules import learning_rate_at


@dataclass(frozen=True, slots=True)
class EpochSettings:
    """What an epoch needs besides model, data and objective."""

    seed: int
    epochs: int
    batch_size: int  # global
    learning_rate: float
    warmup_epochs: int
    clip_norm: float
    augmentation: Augmentation | None = None  # None: the stored pixels
    mixing: Mixing | None = None
    smoothing: float = 0.0  # of the targets that mixing makes; the objective smooths plain labels
    num_copies: int = 1  # of an item per epoch, each augmented on its own
    synthetic_ratio: float = 0.0  # share of every batch that is generated

    def plan(self, data: TrainingSet) -> BatchPlan:
        """Which samples make each batch."""
        clean_first = self.augmentation is not None and self.augmentation.clean_first
        return BatchPlan(data, self.batch_size, self.seed, self.num_copies, clean_first)


def make_optimizer(
    model: PixelModel, *, learning_rate: float, weight_decay: float
) -> torch.optim.AdamW:
    """AdamW; biases, norms, class token and position embedding do not decay."""
    exempt: set[str] = getattr(model.net, "no_weight_decay", set)()
    groups = param_groups_weight_decay(
        model, weight_decay, no_weight_decay_list=[f"net.{name}" for name in exempt]
    )
    return torch.optim.AdamW(groups, lr=learning_rate)


def make_batch(
    data: TrainingSet,
    share: Share,
    *,
    settings: EpochSettings,
    num_classes: int,
    epoch: int,
    step: int,
    device: torch.device,
) -> Batch:
    """Augmented and mixed samples on the device; a function of its arguments, in any thread."""
    items = data.rows(share.index)
    labels, copies, targets = items.labels, share.copies.tolist(), None
    ids = copy_names(items.item_ids, copies)
    if settings.augmentation is None:
        images = items.pixels()
    else:
        images = settings.augmentation.apply(
            items.images, items.item_ids, run_seed=settings.seed, epoch=epoch, repeats=copies
        )
    if settings.mixing is not None:
        images, targets = settings.mixing.apply(
            images,
            labels,
            num_classes=num_classes,
            smoothing=settings.smoothing,
            run_seed=settings.seed,
            epoch=epoch,
            step=step,
            item_ids=ids,
        )
        targets = targets.to(device)
    return Batch(
        images.to(device), labels.to(device), ids, settings.seed, epoch, step, targets=targets
    )


def train_epoch(
    wrapped: nn.Module,
    bare: PixelModel,
    data: TrainingSet,
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    *,
    settings: EpochSettings,
    epoch: int,
    worker: Worker,
    feeding: Feeding = Feeding(),  # noqa: B008 - frozen
    on_step: Callable[[int, int], None] = lambda step, total: None,
) -> dict[str, float]:
    """One pass over the data.

    This worker's sums `loss`, `correct` and `count`, the last learning rate, its images per second
    and the seconds of this time that it waited for data.
    """
    plan = settings.plan(data)
    per_epoch = plan.num_batches
    loss_sum = torch.zeros((), dtype=torch.float64)
    correct, count, lr = 0, 0, 0.0

    def build(numbered: tuple[int, Share]) -> Batch:
        step, share = numbered
        return make_batch(
            data,
            share,
            settings=settings,
            num_classes=bare.spec.num_classes,
            epoch=epoch,
            step=step,
            device=bare.mean.device,
        )

    wrapped.train()
    began = time.perf_counter()
    with Feed(build, enumerate(plan.shares(epoch, worker)), feeding=feeding) as feed:
        for step, batch in enumerate(feed):
            lr = _set_learning_rate(optimizer, settings, step=epoch * per_epoch + step, plan=plan)
            address = (settings.seed, "layers", epoch, step, worker.rank)  # dropout, depth
            torch.manual_seed(generator_for(*address).initial_seed())
            out = objective.loss(wrapped, bare, batch)
            optimizer.zero_grad(set_to_none=True)
            out.loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(bare.parameters(), settings.clip_norm)
            optimizer.step()
            loss_sum += out.loss.item() * len(batch.images)
            correct += int((out.logits.argmax(dim=1) == batch.hard_labels).sum())
            count += len(batch.images)
            on_step(step + 1, per_epoch)
    if not torch.isfinite(loss_sum):
        raise FloatingPointError(f"loss is not finite in epoch {epoch}: lower the learning rate")
    return {
        "loss": float(loss_sum),
        "correct": correct,
        "count": count,
        "lr": lr,
        "images_per_second": count / (time.perf_counter() - began),
        "wait_seconds": feed.wait_seconds,
    }


def _set_learning_rate(
    optimizer: torch.optim.Optimizer, settings: EpochSettings, *, step: int, plan: BatchPlan
) -> float:
    """The rate of this step of the whole training, now in force."""
    lr = learning_rate_at(
        step,
        peak=settings.learning_rate,
        total_steps=settings.epochs * plan.num_batches,
        warmup_steps=settings.warmup_epochs * plan.num_batches,
    )
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr
