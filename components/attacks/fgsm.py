"""Few large steps from a random start: the training attack, and its form for evaluation.

Wong et al. 2020, Algorithm 3; step sizes 1.5 eps (one step) and 0.75 eps (two steps) as in the
published code of Debenedetti et al. 2023, "A Light Recipe to Train Robust Vision Transformers".
"""

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from components.attacks.gradients import input_gradient
from components.attacks.interface import (
    AttackResult,
    Items,
    Search,
    check_budget,
    check_counts,
    hard_labels,
)
from components.attacks.losses import cross_entropy
from components.attacks.pgd import Walk, climb
from components.attacks.projections import Ball, linf_bounds
from components.attacks.starts import random_point
from components.core.types import Images, Labels, LogitsFn

START_OFFSET = 1e-5  # numerical stability constant of the same code; the projection follows it


def fgsm(
    logits_of: LogitsFn,
    x: Images,
    y: Labels,
    *,
    eps: float,
    step_size: float,
    num_steps: int,
    starts: Tensor,
) -> Images:
    """The last iterate of sign-gradient ascent inside the l-inf ball, from `x + eps * starts`.

    `eps` = 0, the first epoch of a warm-up, returns `x` itself: no model call and no random number,
    although the offset alone would move it. `step_size` may exceed `eps`: warm-up keeps the final
    step size and the projection keeps it legal. Soft targets are attacked by their largest share.
    Hold `attack_mode(model)` around the call.
    """
    if eps == 0:
        return x
    y = hard_labels(y)
    low, high = linf_bounds(x, eps=eps)
    x_adv = (x + eps * starts.to(x) + START_OFFSET).clamp(low, high)
    for _ in range(num_steps):
        gradient = input_gradient(logits_of, x_adv, y).gradient
        x_adv = (x_adv + step_size * gradient.sign()).clamp(low, high)
    return x_adv


@dataclass(frozen=True, slots=True, kw_only=True)
class Fgsm:
    """The same steps as an attack to be judged; in l2 they follow the normalised gradient.

    Without a random start a single step is Goodfellow et al. 2015, sec. 4: one that is longer than
    `eps` ends at the same point once projected.
    """

    norm: str
    eps: float
    num_steps: int = 1
    step_size: float | None = None  # None: 1.5 eps / num_steps
    random_start: bool = True

    def __post_init__(self) -> None:
        check_budget("fgsm", norm=self.norm, eps=self.eps)
        check_counts("fgsm", num_steps=self.num_steps)

    @property
    def name(self) -> str:
        return "fgsm" if self.num_steps == 1 else f"fgsm-{self.num_steps}"

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
        points = random_point(items.take(rows), norm=self.norm, eps=self.eps, stream="fgsm")
        return points + START_OFFSET

    def _walk(self, search: Search, ball: Ball) -> Walk:
        default = 1.5 * self.eps / self.num_steps
        step_size = default if self.step_size is None else self.step_size
        return Walk(ball, step_size=step_size, loss_of=cross_entropy)
