"""The evaluation attack: projected gradient ascent that keeps the best point it visited.

Madry et al. 2018, sec. 2.1 (l-inf) and its l2 form with normalised gradients. An item is broken by
any misclassified iterate, so later steps cannot undo a success.

Random starts belong to items, not to batches, and rows are attacked independently of each other.
What a batch can still change is the rounding of the model's own matrix products, whose order of
summation follows the shape; `in_fixed_batches` takes that away as well.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from components.attacks.gradients import input_gradient, is_zero, l2_direction
from components.attacks.losses import LossFn, cross_entropy
from components.attacks.projections import linf_bounds, project_l2
from components.core.types import Images, Labels, Logits, LogitsFn

# (iterates, gradients, their rows in the batch) -> next iterates inside the threat model
MoveFn = Callable[[Images, Images, Tensor], Images]


@dataclass(frozen=True, slots=True)
class AttackResult:
    """What one attack did to each item of a batch.

    `x_adv` is a misclassified point if one was visited, else the visited point of highest loss;
    items that were wrong from the beginning come back unchanged. `zero_gradient` marks items whose
    gradient vanished at the start: the attack was blind there, and their survival proves nothing.
    """

    x_adv: Images
    clean_prediction: Labels
    adversarial_prediction: Labels
    num_evaluations: Tensor  # (B,) int64 forward passes of each item, the clean one included
    zero_gradient: Tensor  # (B,) bool


def in_fixed_batches(logits_of: LogitsFn, *, size: int) -> LogitsFn:
    """`logits_of` that only ever sees `size` rows: longer batches are split, the tail is padded.

    With it an item's result is the same bits whatever shares its batch, and broken items still save
    work in multiples of `size`. Padding rows are copies of a real row and their logits are dropped.
    """

    def fixed(x: Images) -> Logits:
        num_items = x.shape[0]
        padding = x[:1].expand(-num_items % size, *x.shape[1:])
        padded = torch.cat([x, padding.detach()])
        logits = [logits_of(part) for part in torch.split(padded, size)]
        return torch.cat(logits)[:num_items]

    return fixed


def pgd_linf(
    logits_of: LogitsFn,
    x: Images,
    y: Labels,
    *,
    eps: float,
    step_size: float,
    num_steps: int,
    starts: Tensor,
    loss_of: LossFn = cross_entropy,
) -> AttackResult:
    """Sign-gradient ascent in the l-inf ball, starting at `x + eps * starts`."""
    low, high = linf_bounds(x, eps=eps)

    def move(x_adv: Images, gradient: Images, rows: Tensor) -> Images:
        return (x_adv + step_size * gradient.sign()).clamp(low[rows], high[rows])

    start = (x + eps * starts.to(x)).clamp(low, high)
    num_steps = num_steps if eps > 0 else 0
    return _ascend(logits_of, x, y, start=start, move=move, num_steps=num_steps, loss_of=loss_of)


def pgd_l2(
    logits_of: LogitsFn,
    x: Images,
    y: Labels,
    *,
    eps: float,
    step_size: float,
    num_steps: int,
    starts: Tensor,
    loss_of: LossFn = cross_entropy,
) -> AttackResult:
    """Normalised-gradient ascent in the l2 ball; the start is `x + eps * starts`, projected."""

    def move(x_adv: Images, gradient: Images, rows: Tensor) -> Images:
        return project_l2(x_adv + step_size * l2_direction(gradient), center=x[rows], eps=eps)

    start = project_l2(x + eps * starts.to(x), center=x, eps=eps)
    num_steps = num_steps if eps > 0 else 0
    return _ascend(logits_of, x, y, start=start, move=move, num_steps=num_steps, loss_of=loss_of)


class _Best:
    """Per item the first misclassified point, else the visited point of highest loss."""

    def __init__(self, x: Images, y: Labels, logits: Logits, losses: Tensor) -> None:
        self.y = y
        self.x_adv = x.clone()
        self.losses = losses.clone()
        self.prediction = logits.argmax(dim=1)  # first maximum = lowest class
        self.num_evaluations = torch.ones_like(y)

    def visit(self, rows: Tensor, x_adv: Images, logits: Logits, losses: Tensor) -> Tensor:
        """Take over better points; returns which of `rows` still stand, as a bool mask."""
        prediction = logits.argmax(dim=1)
        broken = prediction != self.y[rows]
        better = broken | (losses > self.losses[rows])
        self.x_adv[rows[better]] = x_adv[better]
        self.losses[rows[better]] = losses[better]
        self.prediction[rows] = prediction.where(broken, self.y[rows])
        self.num_evaluations[rows] += 1
        return ~broken


@torch.no_grad()
def _ascend(
    logits_of: LogitsFn,
    x: Images,
    y: Labels,
    *,
    start: Images,
    move: MoveFn,
    num_steps: int,
    loss_of: LossFn,
) -> AttackResult:
    """Visit the start and `num_steps` iterates; broken items leave the batch, their cost ends."""
    logits = logits_of(x)
    clean_prediction = logits.argmax(dim=1)
    best = _Best(x, y, logits, loss_of(logits, y))
    zero_gradient = torch.zeros_like(y, dtype=torch.bool)
    rows = (clean_prediction == y).nonzero().squeeze(1)
    x_adv = start[rows]
    for step in range(num_steps):
        if len(rows) == 0:
            break
        point = input_gradient(logits_of, x_adv, y[rows], loss_of=loss_of)
        if step == 0:
            zero_gradient[rows] = is_zero(point.gradient)
        standing = best.visit(rows, x_adv, point.logits, point.losses)
        rows = rows[standing]
        x_adv = move(x_adv[standing], point.gradient[standing], rows)
    if num_steps > 0 and len(rows) > 0:  # the last iterate needs no gradient
        logits = logits_of(x_adv)
        best.visit(rows, x_adv, logits, loss_of(logits, y[rows]))
    return AttackResult(
        x_adv=best.x_adv,
        clean_prediction=clean_prediction,
        adversarial_prediction=best.prediction,
        num_evaluations=best.num_evaluations,
        zero_gradient=zero_gradient,
    )
