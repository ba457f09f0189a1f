"""Gradient accumulation: noise becomes an image of a class by steps along the gradient.

The thesis "Adversarially Robust Vision Transformers", Figs. 12 and 14: from uniform noise, 100
targeted steps that decrease the cross-entropy of a random class. Its "eps = 15" is l-inf in units
of the pixel range, so the ball never binds, and its random start adds U(-15, 15) before clipping:
96.7 % of the first image is 0 or 1. Preset `l2` has a ball that binds.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from components.analyze.settings import AccumulationSettings
from components.attacks.gradient import sign_ascent
from components.attacks.gradients import input_gradient, l2_direction
from components.attacks.interface import Items
from components.attacks.losses import cross_entropy
from components.attacks.projections import project_l2
from components.attacks.starts import random_point
from components.core.seeding import generator_for
from components.core.types import Images, Labels, Logits, LogitsFn


@dataclass(frozen=True, slots=True)
class Preset:
    """Budget and steps."""

    norm: str
    eps: float  # in units of [0, 1] pixels
    step_size: float
    random_start: bool  # noise of size eps is added to the seed image


PRESETS: Mapping[str, Preset] = {
    "thesis": Preset("linf", 15.0, step_size=0.225, random_start=True),
    "l2": Preset("l2", 15.0, step_size=0.5, random_start=False),
}


@dataclass(frozen=True, slots=True, eq=False)
class Accumulated:
    """The images and what the model makes of them."""

    images: Images
    confidence: Tensor  # (B,) probability of the target
    confidence_before: Tensor  # of the seed image


def seed_images(
    shape: tuple[int, int, int], *, num_classes: int, num_images: int, seed: int
) -> Items:
    """Uniform noise with random targets, the same for all models; image i depends on (seed, i)."""
    images, targets = [], []
    for index in range(num_images):
        generator = generator_for(seed, "accumulation", index)
        images.append(torch.rand(shape, generator=generator))
        targets.append(int(torch.randint(num_classes, (), generator=generator)))
    ids = tuple(str(index) for index in range(num_images))
    return Items(torch.stack(images), torch.tensor(targets), ids, run_seed=seed)


def accumulate(logits_of: LogitsFn, seeds: Items, how: AccumulationSettings) -> Accumulated:
    """Images in [0, 1] that the model assigns to the targets of `seeds`.

    Hold `attack_mode(model)` around the call.
    """
    preset = PRESETS[how.preset]
    start = seeds.x
    if preset.random_start:
        start = random_point(seeds, norm=preset.norm, eps=preset.eps, stream="accumulation start")
    images = _ascend(logits_of, seeds, start, preset, num_steps=how.num_steps)
    return Accumulated(
        images, _confidence(logits_of, images, seeds.y), _confidence(logits_of, seeds.x, seeds.y)
    )


def _towards(logits: Logits, y: Labels) -> Tensor:
    """(B,): its ascent decreases the cross-entropy of the target."""
    return -cross_entropy(logits, y)


def _ascend(
    logits_of: LogitsFn, seeds: Items, start: Images, preset: Preset, *, num_steps: int
) -> Images:
    """The last iterate of sign steps (l-inf) or normalised steps (l2), each projected."""
    x, y, eps, step_size = seeds.x, seeds.y, preset.eps, preset.step_size
    if preset.norm == "linf":
        return sign_ascent(
            logits_of, x, y, start=start, loss_of=_towards,
            eps=eps, step_size=step_size, num_steps=num_steps,
        )  # fmt: skip
    z = project_l2(start, center=x, eps=eps)
    for _ in range(num_steps):
        gradient = input_gradient(logits_of, z, y, loss_of=_towards).gradient
        z = project_l2(z + step_size * l2_direction(gradient), center=x, eps=eps)
    return z


@torch.no_grad()
def _confidence(logits_of: LogitsFn, x: Images, y: Labels) -> Tensor:
    return logits_of(x).float().softmax(dim=1).gather(1, y[:, None]).squeeze(1)
