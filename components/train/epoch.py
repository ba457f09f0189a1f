"""One training step and one epoch, on one worker."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

import torch
from torch import nn

from components.core.seeding import generator_for
from components.core.transfers import sent
from components.data.augment import Augmentation, Mixing
from components.data.augment.repeats import copy_names
from components.models.pixels import PixelModel
from components.train.feed import BatchPlan, Feed, Feeding, Share, TrainingSet, Worker
from components.train.objectives.base import Batch, LossOut, Objective
from components.train.optim import Updater, autocast_passes, make_optimizer, without_sync
from components.train.passes import precision_on
from components.train.settings import TrainSettings
from components.train.tally import Tally


@dataclass(frozen=True)
class EpochPlan:
    """The train section of a recipe, for one model on one dataset."""

    train: TrainSettings
    seed: int
    epochs: int
    image_size: int  # side of the images that the model sees
    synthetic_ratio: float = 0.0  # share of every batch that is generated

    @cached_property
    def augmentation(self) -> Augmentation:
        """Augmentation of single images."""
        return Augmentation.of(self.train.augment, size=self.image_size)

    @cached_property
    def mixing(self) -> Mixing | None:
        """MixUp and CutMix; None if both are off."""
        return Mixing.of(self.train.augment)

    def batches(self, data: TrainingSet) -> BatchPlan:
        """Which samples make each batch."""
        return BatchPlan(data, self.train, self.seed)

    def updater(self, model: PixelModel) -> Updater:
        """The updater that turns this model's gradients into steps."""
        optimizer = make_optimizer(model, self.train)
        precision = precision_on(self.train, model.mean.device.type)
        return Updater(optimizer, model, clip_norm=self.train.clip_norm, precision=precision)

    def rate_at(self, epoch: int, step: int, *, steps_per_epoch: int) -> float:
        """Learning rate of a step of an epoch."""
        epochs = self.epochs
        return self.train.rate_at(epoch, step, epochs=epochs, steps_per_epoch=steps_per_epoch)


@dataclass(frozen=True, slots=True)
class StepDone:
    """Progress of the epoch after a step, and this worker's sums of the step."""

    num_done: int
    num_steps: int  # steps of the epoch
    tally: Tally


def make_batch(
    data: TrainingSet,
    share: Share,
    *,
    plan: EpochPlan,
    num_classes: int,
    epoch: int,
    step: int,
    device: torch.device,
    num_steps: int | None = None,
    objective: Objective | None = None,
) -> Batch:
    """Augmented and mixed samples on the device, with the random numbers of the objective's
    attack; a function of its arguments, in any thread.
    """
    items = data.rows(share.index)
    labels, copies, targets = items.labels, share.copies.tolist(), None
    ids = copy_names(items.item_ids, copies)
    images = plan.augmentation.apply(
        items.images, items.item_ids, run_seed=plan.seed, epoch=epoch, repeats=copies
    )
    if plan.mixing is not None:
        images, targets = plan.mixing.apply(
            images,
            labels,
            num_classes=num_classes,
            smoothing=plan.train.label_smoothing,
            run_seed=plan.seed,
            epoch=epoch,
            step=step,
            item_ids=ids,
        )
        targets = sent(targets, device)
    noise = None
    if objective is not None:
        noise = objective.start_noise(ids, images.shape[1:], run_seed=plan.seed, epoch=epoch)
    return Batch(
        sent(images, device),
        sent(labels, device),
        ids,
        plan.seed,
        epoch,
        step,
        targets,
        num_steps,
        start_noise=None if noise is None else sent(noise, device),
    )


def epoch_batches(
    data: TrainingSet,
    bare: PixelModel,
    *,
    plan: EpochPlan,
    epoch: int,
    worker: Worker,
    feeding: Feeding,
    first_step: int = 0,
    objective: Objective | None = None,
) -> Feed[tuple[int, Share], Batch]:
    """A worker's batches of an epoch from some step on, built ahead."""
    planned = plan.batches(data)
    shares = list(islice(enumerate(planned.shares(epoch, worker)), first_step, None))
    index = torch.cat([share.index for _, share in shares] or [torch.arange(0)])
    stack = ExitStack()
    ready = stack.enter_context(data.planned(index))

    def build(numbered: tuple[int, Share]) -> Batch:
        step, share = numbered
        return make_batch(
            ready,
            share,
            plan=plan,
            num_classes=bare.spec.num_classes,
            epoch=epoch,
            step=step,
            device=bare.mean.device,
            num_steps=planned.num_batches,
            objective=objective,
        )

    return Feed(build, shares, feeding=feeding, close=stack.close)


def train_epoch(
    wrapped: nn.Module,
    bare: PixelModel,
    data: TrainingSet,
    objective: Objective,
    updater: Updater,
    *,
    plan: EpochPlan,
    epoch: int,
    worker: Worker,
    feeding: Feeding = Feeding(),  # noqa: B008 - frozen
    first_step: int = 0,
    after_step: Callable[[StepDone], None] = lambda done: None,
) -> dict[str, float]:
    """Train one pass over the data, or the rest of it from `first_step` on.

    Returns how many items this worker saw, the last learning rate, its images per second and the
    seconds that it waited for data.
    """
    num_steps = plan.batches(data).num_batches
    count, lr, sums = 0, 0.0, Tally()
    precision = precision_on(plan.train, bare.mean.device.type)
    batches = epoch_batches(
        data,
        bare,
        plan=plan,
        epoch=epoch,
        worker=worker,
        feeding=feeding,
        first_step=first_step,
        objective=objective,
    )
    wrapped.train()
    began = time.perf_counter()
    with batches as feed:
        for batch in feed:
            lr = plan.rate_at(epoch, batch.step, steps_per_epoch=num_steps)
            address = (plan.seed, "layers", epoch, batch.step, worker.rank)  # dropout, depth
            torch.manual_seed(generator_for(*address).initial_seed())
            with autocast_passes(bare, precision):
                micro_batch = plan.train.micro_batch
                tally = _gradients(wrapped, bare, objective, updater, batch, micro_batch)
            updater.step(lr)
            sums.merge(tally)
            count += len(batch.images)
            after_step(StepDone(batch.step + 1, num_steps, tally))
    loss = sums.means().get("loss", 0.0)  # waits for the device
    seconds = time.perf_counter() - began
    if not math.isfinite(loss):
        raise FloatingPointError(f"loss is not finite in epoch {epoch}: lower the learning rate")
    return {
        "count": count,
        "lr": lr,
        "images_per_second": count / seconds,
        "wait_seconds": feed.wait_seconds,
    }


def _gradients(
    wrapped: nn.Module,
    bare: PixelModel,
    objective: Objective,
    updater: Updater,
    batch: Batch,
    micro_batch: int | None,
) -> Tally:
    """Accumulate the gradient of the batch's mean loss; workers synchronise in the last part."""
    tally = Tally()
    parts = list(split_batch(batch, micro_batch))
    for part in parts[:-1]:
        with without_sync(wrapped):
            _backward(wrapped, bare, objective, updater, part, len(batch.images), tally)
    _backward(wrapped, bare, objective, updater, parts[-1], len(batch.images), tally)
    return tally


def _backward(
    wrapped: nn.Module,
    bare: PixelModel,
    objective: Objective,
    updater: Updater,
    part: Batch,
    batch_size: int,
    tally: Tally,
) -> None:
    with objective.perturbed(wrapped, bare, part) as seen:
        out = objective.loss(wrapped, bare, seen)
        updater.backward(out.loss * (len(part.images) / batch_size))
    _note(tally, out, part)


def _note(tally: Tally, out: LossOut, part: Batch) -> None:
    count = len(part.images)
    tally.add("loss", out.loss.detach().double() * count, count)
    if out.logits is not None:
        tally.add("accuracy", (out.logits.argmax(dim=1) == part.hard_labels).sum(), count)
    if out.adversarial_logits is not None:
        hits = out.adversarial_logits.argmax(dim=1) == part.hard_labels
        tally.add("adversarial_accuracy", hits.sum(), count)
    for name, mean in out.metrics.items():
        tally.add(name, mean * count, count)


def split_batch(batch: Batch, size: int | None) -> Iterator[Batch]:
    """Consecutive parts of at most `size` items that belong to the same step."""
    count = len(batch.images)
    if size is None or size >= count:
        yield batch
        return
    for start in range(0, count, size):
        rows = slice(start, start + size)
        yield replace(
            batch,
            images=batch.images[rows],
            labels=batch.labels[rows],
            item_ids=batch.item_ids[rows],
            targets=None if batch.targets is None else batch.targets[rows],
            adversarial=None if batch.adversarial is None else batch.adversarial[rows],
            start_noise=None if batch.start_noise is None else batch.start_noise[rows],
        )
