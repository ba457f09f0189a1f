"""Accuracy on held-out validation items, clean and under a short PGD; never on test."""

from collections.abc import Iterator

import torch

from components.attacks.gradients import attack_mode
from components.attacks.pgd import pgd_linf
from components.attacks.starts import random_starts
from components.data.prepared import Split
from components.models.pixels import PixelModel
from components.train.objectives.base import Batch, Objective

BATCH = 128  # validation batches are fixed: logits depend on the shape


def _batches(data: Split, *, seed: int, device: torch.device) -> Iterator[Batch]:
    """One at a time: a validation split may be larger than memory."""
    for start in range(0, len(data), BATCH):
        part = data.span(start, start + BATCH)
        images, labels = part.pixels().to(device), part.labels.to(device)
        yield Batch(images, labels, part.item_ids, seed, 0, start // BATCH)


def validation_accuracy(
    model: PixelModel, data: Split, objective: Objective, *, seed: int
) -> float:
    """Share of validation items classified rightly on what the objective shows the model."""
    model.eval()
    correct = 0
    with torch.inference_mode():
        for batch in _batches(data, seed=seed, device=model.mean.device):
            logits = objective.validation_logits(model, batch)
            correct += int((logits.argmax(dim=1) == batch.labels).sum())
    return correct / len(data)


def robust_accuracy(
    model: PixelModel, data: Split, *, eps: float, num_steps: int, seed: int
) -> float:
    """Share of validation items right before and after l-inf PGD at the full epsilon."""
    standing = 0
    with attack_mode(model):
        for batch in _batches(data, seed=seed, device=model.mean.device):
            starts = random_starts(
                batch.item_ids, tuple(batch.images.shape[1:]), run_seed=seed, stream="validation"
            )
            result = pgd_linf(
                model,
                batch.images,
                batch.labels,
                eps=eps,
                step_size=eps / 4,
                num_steps=num_steps,
                starts=starts.to(batch.images.device),
            )
            standing += int((result.adversarial_prediction == batch.labels).sum())
    return standing / len(data)
