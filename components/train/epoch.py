"""The optimiser, the step and the epoch; one worker's part of it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from timm.optim import param_groups_weight_decay
from torch import Tensor, nn

from components.core.seeding import generator_for
from components.data.augmentation import augment_batch
from components.data.prepared import ImageSplit
from components.models.pixels import PixelModel
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
    pad_crop: int = 0
    flip: bool = False


@dataclass(frozen=True, slots=True)
class Worker:
    """This process among those that share the global batch."""

    rank: int = 0
    world: int = 1


def make_optimizer(
    model: PixelModel, *, learning_rate: float, weight_decay: float
) -> torch.optim.AdamW:
    """AdamW; biases, norms, class token and position embedding do not decay."""
    exempt: set[str] = getattr(model.net, "no_weight_decay", set)()
    groups = param_groups_weight_decay(
        model, weight_decay, no_weight_decay_list=[f"net.{name}" for name in exempt]
    )
    return torch.optim.AdamW(groups, lr=learning_rate)


def num_batches(num_items: int, batch_size: int) -> int:
    """Whole batches of an epoch; a set smaller than one batch is one batch."""
    return max(1, num_items // batch_size)


def batch_indices(
    num_items: int, *, batch_size: int, seed: int, epoch: int, worker: Worker
) -> Iterator[Tensor]:
    """This worker's share of every global batch, in the order that (seed, epoch) decides.

    Shares are equal, so the mean of the workers' gradients is the gradient of the global batch.
    """
    order = torch.randperm(num_items, generator=generator_for(seed, "shuffle", epoch))
    share = min(batch_size, num_items) // worker.world
    if share == 0:
        raise ValueError(f"batch of {batch_size} cannot be shared by {worker.world} workers")
    for index in range(num_batches(num_items, batch_size)):
        start = index * batch_size + worker.rank * share
        yield order[start : start + share]


def make_batch(
    data: ImageSplit,
    index: Tensor,
    *,
    settings: EpochSettings,
    epoch: int,
    step: int,
    device: torch.device,
) -> Batch:
    """Augmented pixels of some items on the device."""
    ids = tuple(data.item_ids[i] for i in index.tolist())
    images = data.pixels(index)
    if settings.pad_crop or settings.flip:
        images = augment_batch(
            images,
            ids,
            run_seed=settings.seed,
            epoch=epoch,
            pad_crop=settings.pad_crop,
            flip=settings.flip,
        )
    return Batch(images.to(device), data.labels[index].to(device), ids, settings.seed, epoch, step)


def train_epoch(
    wrapped: nn.Module,
    bare: PixelModel,
    data: ImageSplit,
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    *,
    settings: EpochSettings,
    epoch: int,
    worker: Worker,
    on_step: Callable[[int, int], None] = lambda step, total: None,
) -> dict[str, float]:
    """One pass; this worker's sums `loss`, `correct` and `count`, and the last learning rate."""
    per_epoch = num_batches(len(data), settings.batch_size)
    device = bare.mean.device
    loss_sum = torch.zeros((), dtype=torch.float64)
    correct, count, lr = 0, 0, 0.0
    wrapped.train()
    shares = batch_indices(
        len(data), batch_size=settings.batch_size, seed=settings.seed, epoch=epoch, worker=worker
    )
    for step, index in enumerate(shares):
        batch = make_batch(data, index, settings=settings, epoch=epoch, step=step, device=device)
        lr = learning_rate_at(
            epoch * per_epoch + step,
            peak=settings.learning_rate,
            total_steps=settings.epochs * per_epoch,
            warmup_steps=settings.warmup_epochs * per_epoch,
        )
        for group in optimizer.param_groups:
            group["lr"] = lr
        address = (settings.seed, "layers", epoch, step, worker.rank)  # dropout, stochastic depth
        torch.manual_seed(generator_for(*address).initial_seed())
        out = objective.loss(wrapped, bare, batch)
        optimizer.zero_grad(set_to_none=True)
        out.loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(bare.parameters(), settings.clip_norm)
        optimizer.step()
        loss_sum += out.loss.item() * len(index)
        correct += int((out.logits.argmax(dim=1) == batch.labels).sum())
        count += len(index)
        on_step(step + 1, per_epoch)
    if not torch.isfinite(loss_sum):
        raise FloatingPointError(f"loss is not finite in epoch {epoch}: lower the learning rate")
    return {"loss": float(loss_sum), "correct": correct, "count": count, "lr": lr}
