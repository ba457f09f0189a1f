"""Momentum iterative FGSM: steps follow an accumulated direction (Dong et al. 2018, Algorithm 1).

    m_{t+1} = mu * m_t + g_t / mean|g_t|,      x_{t+1} = P(x_t + a * direction(m_{t+1}))

The paper divides by the sum of |g|; the mean differs by a constant factor, which no direction sees.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from components.attacks.interface import AttackResult, Items, Search, check_budget, check_counts
from components.attacks.losses import LossFn, cross_entropy
from components.attacks.pgd import Walk, climb
from components.attacks.projections import Ball
from components.attacks.starts import random_point
from components.core.errors import CasemateError
from components.core.types import Images, LogitsFn


class _MomentumWalk(Walk):
    def __init__(
        self, ball: Ball, x: Images, *, step_size: float, decay: float, loss_of: LossFn
    ) -> None:
        super().__init__(ball, step_size=step_size, loss_of=loss_of)
        self.decay = decay
        self.momentum = torch.zeros_like(x)

    def move(self, gradient: Images, *, rows: Tensor, step: int) -> Images:
        size = gradient.abs().mean(dim=(1, 2, 3), keepdim=True)
        unit = gradient / torch.where(size == 0, torch.ones_like(size), size)
        momentum = self.decay * self.momentum[rows] + unit
        self.momentum[rows] = momentum
        return super().move(momentum, rows=rows, step=step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mim:
    """MI-FGSM on the cross-entropy, published with mu = 1, ten steps of eps / 10 from x itself."""

    norm: str
    eps: float
    num_steps: int = 10
    step_size: float | None = None  # None: eps / num_steps
    decay: float = 1.0  # mu
    random_start: bool = False

    def __post_init__(self) -> None:
        check_budget("mim", norm=self.norm, eps=self.eps)
        check_counts("mim", num_steps=self.num_steps)
        if not self.decay >= 0:
            raise CasemateError("mim.decay", self.decay, "must be >= 0")

    @property
    def name(self) -> str:
        return f"mim-{self.num_steps}"

    def __call__(self, logits_of: LogitsFn, items: Items) -> AttackResult:
        return climb(
            logits_of,
            items,
            norm=self.norm,
            eps=self.eps,
            num_steps=self.num_steps,
            start_of=partial(self._start, items),
            walk_on=self._walk,
        )

    def _start(self, items: Items, rows: Tensor, restart: int) -> Images:
        if not self.random_start:
            return items.x[rows]
        return random_point(items.take(rows), norm=self.norm, eps=self.eps, stream="mim")

    def _walk(self, search: Search, ball: Ball) -> Walk:
        step_size = self.eps / self.num_steps if self.step_size is None else self.step_size
        return _MomentumWalk(
            ball, search.items.x, step_size=step_size, decay=self.decay, loss_of=cross_entropy
        )
