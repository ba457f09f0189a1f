"""Accuracy on held-out validation items, clean and under a short attack; never on test."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from components.attacks.apgd import Apgd
from components.attacks.gradient import pgd_linf
from components.attacks.gradients import attack_mode
from components.attacks.interface import Items
from components.attacks.starts import random_starts
from components.core.types import Labels
from components.data.prepared import Split
from components.models.pixels import PixelModel
from components.train.feed import Worker
from components.train.objectives.base import Batch, Objective
from components.train.objectives.inner import predictions
from components.train.settings import TrainSettings
from components.train.tally import Total

BATCH = 128  # validation batches are fixed: logits depend on the shape


def _itself(sums: Tensor) -> Tensor:
    return sums


@dataclass(frozen=True, slots=True)
class Workers:
    """Validation batches are dealt to workers in turn; `total` adds what all of them found."""

    worker: Worker = Worker()  # noqa: RUF009 - frozen
    total: Total = _itself

    def sum(self, found: Mapping[int, Tensor], *, num_batches: int) -> float:
        """The sum over all batches, in their order: equal for any number of workers."""
        own = torch.zeros(num_batches, dtype=torch.float64)
        if found:
            own[list(found)] = torch.stack(list(found.values())).double().cpu()
        return float(sum(self.total(own).tolist()))


class AttackPredictions(Protocol):
    """An attack on validation items."""

    def predictions(self, model: PixelModel, batch: Batch) -> Labels:
        """Classes of the attacked images. Hold `attack_mode(model)` around the call."""
        ...


@dataclass(frozen=True, slots=True)
class ValidationAttack:
    """An l-inf attack at the full epsilon, also during a warm-up of the objective.

    `pgd` takes steps of eps / 4; `apgd-ce` adapts its own and is stronger.
    """

    eps: float
    num_steps: int
    kind: Literal["pgd", "apgd-ce"]

    def predictions(self, model: PixelModel, batch: Batch) -> Labels:
        """The classes of the attacked images. Hold `attack_mode(model)` around the call."""
        if self.kind == "apgd-ce":
            attack = Apgd(norm="linf", eps=self.eps, num_steps=self.num_steps)
            items = Items(batch.images, batch.labels, batch.item_ids, run_seed=batch.seed)
            return attack(model, items).adversarial_prediction
        starts = random_starts(
            batch.item_ids, tuple(batch.images.shape[1:]), run_seed=batch.seed, stream="validation"
        )
        result = pgd_linf(
            model,
            batch.images,
            batch.labels,
            eps=self.eps,
            step_size=self.eps / 4,
            num_steps=self.num_steps,
            starts=starts.to(batch.images.device),
        )
        return result.adversarial_prediction


@dataclass(frozen=True, slots=True)
class TrainingAttack:
    """The attack of an objective whose epsilon does not warm up."""

    objective: Objective

    def predictions(self, model: PixelModel, batch: Batch) -> Labels:
        """The classes of the attacked images, or of the clean ones if those are misclassified."""
        clean = predictions(model, batch.images)
        attacked = predictions(model, self.objective.craft(model, batch))
        return torch.where(clean == batch.labels, attacked, clean)


def _batches(data: Split, *, seed: int, device: torch.device, worker: Worker) -> Iterator[Batch]:
    """A worker's batches, one at a time: a validation split may be larger than memory."""
    for start in range(worker.rank * BATCH, len(data), worker.world * BATCH):
        part = data.span(start, start + BATCH)
        images, labels = part.pixels().to(device), part.labels.to(device)
        yield Batch(images, labels, part.item_ids, seed, 0, start // BATCH)


def validation_attack(train: TrainSettings, objective: Objective) -> AttackPredictions | None:
    """The attack on validation items after every epoch; None: no classes, or no epsilon."""
    eps = train.val_eps or objective.eps
    if eps is None or not objective.classifies:
        return None
    if train.val_attack == "train":
        return TrainingAttack(objective.without_warmup(eps))
    return ValidationAttack(eps, train.val_steps, train.val_attack)


def validation_score(
    model: PixelModel,
    data: Split,
    objective: Objective,
    *,
    seed: int,
    workers: Workers = Workers(),  # noqa: B008 - frozen
) -> float:
    """Mean of the objective's validation metric over validation items."""
    model.eval()
    with torch.inference_mode():
        sums = {
            batch.step: objective.validation_scores(model, batch).double().sum()
            for batch in _batches(data, seed=seed, device=model.mean.device, worker=workers.worker)
        }
    return workers.sum(sums, num_batches=_num_batches(data)) / len(data)


def robust_accuracy(
    model: PixelModel,
    data: Split,
    attack: AttackPredictions,
    *,
    seed: int,
    workers: Workers = Workers(),  # noqa: B008 - frozen
) -> float:
    """Share of validation items classified correctly before and after the attack."""
    device = model.mean.device
    with attack_mode(model):
        robust = {
            batch.step: (attack.predictions(model, batch) == batch.labels).sum()
            for batch in _batches(data, seed=seed, device=device, worker=workers.worker)
        }
    return workers.sum(robust, num_batches=_num_batches(data)) / len(data)


def _num_batches(data: Split) -> int:
    return -(-len(data) // BATCH)
