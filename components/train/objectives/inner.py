"""The inner maximisation of adversarial training: the last iterate of a few projected sign steps.

Madry et al. 2018, eq. 2.1 and sec. 2.1. Unlike an attack that is judged, it never stops early and
keeps no best point: the training images of Wong et al. 2020 and Debenedetti et al. 2023 are last
iterates. Attacks run on the bare model in eval mode with frozen weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from components.attacks.gradient import START_OFFSET
from components.attacks.gradients import attack_mode, input_gradient
from components.attacks.interface import Items, check_budget, check_counts
from components.attacks.losses import LossFn
from components.attacks.projections import linf_bounds
from components.attacks.starts import random_starts
from components.core.errors import CasemateError
from components.core.types import Images
from components.train.objectives.base import Batch, LossOut, Objective

START_NOISE = 0.001  # standard deviation of the start of TRADES and MART as published
STREAMS = {"uniform": "fgsm", "normal": "normal"}  # renaming one changes every training
CHOICES = {
    "step_rule": ("fixed", "proportional"),
    "start": tuple(STREAMS),
    "warmup_per": ("epoch", "step"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerAttack:
    """Settings of the training attack, in the l-inf ball.

    While epsilon warms up a `fixed` step keeps the length that fits the final epsilon, as published
    (the projection keeps it legal), and a `proportional` one shrinks with epsilon. Starts are
    `uniform` in the ball, or `normal`: close to the image.
    """

    eps: float
    num_steps: int = 1
    step_size: float | None = None  # at the final epsilon; None: 1.5 eps / num_steps
    step_rule: str = "fixed"
    start: str = "uniform"
    warmup: Callable[[float], float] | None = None  # epsilon after so many epochs; None: all of it
    warmup_per: str = "epoch"  # `warmup` is asked at whole epochs, or at every step

    def __post_init__(self) -> None:
        check_budget("train.objective", norm="linf", eps=self.eps)
        check_counts("train.objective", num_steps=self.num_steps)
        for key, known in CHOICES.items():
            check_choice(f"train.objective.{key}", getattr(self, key), known)
        if self.step_size is not None and not self.step_size > 0:
            raise CasemateError("train.objective.step_size", self.step_size, "must be above 0")

    def eps_at(self, epoch: float) -> float:
        """Epsilon after so many epochs, a fraction of one included."""
        return self.eps if self.warmup is None else self.warmup(epoch)

    def eps_of(self, batch: Batch) -> float:
        """Epsilon of one step."""
        if self.warmup_per == "epoch":
            return self.eps_at(batch.epoch)
        if batch.num_steps is None:
            raise ValueError("epsilon per step needs the number of steps of the epoch")
        return self.eps_at(batch.epoch + batch.step / batch.num_steps)

    def __call__(self, bare: nn.Module, batch: Batch, y: Tensor, loss_of: LossFn) -> Images:
        """Images that raise `loss_of(logits, y)`, itself a value per item; eps = 0 changes none."""
        x, eps = batch.images, self.eps_of(batch)
        if eps == 0:  # during a warm-up the first epoch is clean, and pays for no attack
            return x
        base = 1.5 * self.eps / self.num_steps if self.step_size is None else self.step_size
        step_size = base if self.step_rule == "fixed" else base * eps / self.eps
        low, high = linf_bounds(x, eps=eps)
        x_adv = self._start(batch, eps).clamp(low, high)
        with attack_mode(bare):
            for _ in range(self.num_steps):
                gradient = input_gradient(bare, x_adv, y, loss_of=loss_of).gradient
                x_adv = (x_adv + step_size * gradient.sign()).clamp(low, high)
        return x_adv

    def _start(self, batch: Batch, eps: float) -> Images:
        """Where the ascent begins, still to be projected; a function of item and epoch."""
        x, stream = batch.images, f"{STREAMS[self.start]}-{batch.epoch}"
        if self.start == "normal":
            items = Items(x, batch.labels, batch.item_ids, run_seed=batch.seed)
            return x + START_NOISE * items.normal(stream)
        shape = tuple(x.shape[1:])
        starts = random_starts(batch.item_ids, shape, run_seed=batch.seed, stream=stream)
        return x + eps * starts.to(x) + START_OFFSET


@runtime_checkable
class AdversarialObjective(Objective, Protocol):
    """An objective in two halves: `craft` makes images, `outer_loss` is minimised on them.

    Wrappers need the halves: adversarial weights belong to images that were made before.
    """

    @property
    def attack(self) -> InnerAttack: ...

    def craft(self, bare: nn.Module, batch: Batch) -> Images:
        """Adversarial images at the model's present weights."""
        ...

    def outer_loss(
        self, wrapped: nn.Module, bare: nn.Module, batch: Batch, x_adv: Images
    ) -> LossOut: ...

    def loss(self, wrapped: nn.Module, bare: nn.Module, batch: Batch) -> LossOut:
        x_adv = self.craft(bare, batch) if batch.adversarial is None else batch.adversarial
        return self.outer_loss(wrapped, bare, batch, x_adv)

    def eps_at(self, epoch: int) -> float | None:
        return self.attack.eps_at(epoch)


def check_choice(key: str, value: str, known: tuple[str, ...]) -> None:
    """Refuse a word that is not among the known ones."""
    if value not in known:
        raise CasemateError(key, value, f"is unknown; choose {' or '.join(known)}")


def has_batch_statistics(model: nn.Module) -> bool:
    """Whether rows of a training batch see each other: two batches must not become one."""
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())


def predictions(model: nn.Module, images: Images) -> Tensor:
    """(B,) classes without a graph, in the model's present mode."""
    with torch.no_grad():
        labels: Tensor = model(images).argmax(dim=1)
    return labels
