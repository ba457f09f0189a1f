"""Adversarial training makes robust: 200 steps against a twin that trains on clean images."""

import pytest
import torch

from components.attacks.gradient import Pgd
from components.attacks.gradients import attack_mode
from components.attacks.interface import Items
from components.models.spec import ModelSpec
from components.train.objectives.adversarial import AdversarialTraining
from components.train.objectives.base import Batch
from components.train.objectives.settings import FgsmTrainingSettings, StandardSettings
from components.train.objectives.standard import Standard
from components.train.session import initial_model

EPS = 0.1
SPEC = ModelSpec(
    "tiny_vit",
    2,
    1,
    8,
    (0.5,),
    (0.5,),
    options={"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2},
)


def images(num_items: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The label in faint stripes, always right, and in a bright half, right six times in seven.

    Stripes of 0.08 predict better than the half does, and an attack of 0.1 turns them over.
    """
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (num_items,), generator=generator)
    sign = (2 * labels - 1).view(-1, 1, 1, 1)
    honest = torch.where(torch.rand(num_items, 1, 1, 1, generator=generator) < 0.85, sign, -sign)
    stripes = 1 - 2 * (torch.arange(8) % 2).float()
    half = torch.where(torch.arange(8) < 4, 1.0, -1.0)[:, None]
    noise = 0.04 * torch.randn(num_items, 1, 8, 8, generator=generator)
    return (0.5 + 0.08 * sign * stripes + 0.2 * honest * half + noise).clamp(0, 1), labels


def robust_accuracy(objective) -> tuple[float, float]:
    """Clean and PGD-10 accuracy after 200 steps, on new items."""
    model = initial_model(SPEC, seed=0).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    x, y = images(1600, seed=0)
    ids = tuple(str(item) for item in range(len(x)))
    for step in range(200):
        rows = torch.arange(32 * step, 32 * (step + 1)) % len(x)
        named = tuple(ids[row] for row in rows)
        batch = Batch(x[rows], y[rows], named, 0, step // 50, step % 50)
        loss = objective.loss(model, model, batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    x, y = images(200, seed=1)
    with attack_mode(model):
        result = Pgd(norm="linf", eps=EPS, num_steps=10)(model, Items(x, y, ids[:200], 0))
    pairs = (result.clean_prediction, result.adversarial_prediction)
    clean, robust = ((prediction == y).double().mean().item() for prediction in pairs)
    return clean, robust


@pytest.fixture(scope="module")
def standard_twin() -> tuple[float, float]:
    return robust_accuracy(Standard(StandardSettings(), label_smoothing=0.0))


@pytest.mark.parametrize("num_steps", [1, 2])
def test_adversarial_training_gains_twenty_points(standard_twin, num_steps):
    clean, before = standard_twin
    assert clean > 0.95  # the twin has learned its task
    attack = FgsmTrainingSettings(eps=EPS, num_steps=num_steps)
    _, after = robust_accuracy(AdversarialTraining(attack, label_smoothing=0.0))
    assert after > before + 0.2
