"""Accuracy on held-out validation items, clean and under a short attack; never on test."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from components.attacks.apgd import Apgd
from components.attacks.gradient import pgd_linf
from components.attacks.gradients import attack_mode
from components.attacks.interface import Items
from components.attacks.starts import random_starts
from components.core.types import Labels
from components.data.prepared import Split
from components.models.pixels import PixelModel
from components.train.objectives.base import Batch, Objective
from components.train.objectives.inner import predictions
from components.train.settings import TrainSettings

BATCH = 128  # validation batches are fixed: logits depend on the shape


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


def _batches(data: Split, *, seed: int, device: torch.device) -> Iterator[Batch]:
    """Batches, one at a time: a validation split may be larger than memory."""
    for start in range(0, len(data), BATCH):
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


def validation_score(model: PixelModel, data: Split, objective: Objective, *, seed: int) -> float:
    """Mean of the objective's validation metric over validation items."""
    model.eval()
    total = 0.0
    with torch.inference_mode():
        for batch in _batches(data, seed=seed, device=model.mean.device):
            total += float(objective.validation_scores(model, batch).double().sum())
    return total / len(data)


def robust_accuracy(
    model: PixelModel, data: Split, attack: AttackPredictions, *, seed: int
) -> float:
    """Share of validation items classified correctly before and after the attack."""
    num_robust = 0
    with attack_mode(model):
        for batch in _batches(data, seed=seed, device=model.mean.device):
            num_robust += int((attack.predictions(model, batch) == batch.labels).sum())
    return num_robust / len(data)
