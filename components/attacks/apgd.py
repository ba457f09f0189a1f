"""APGD: projected gradient ascent with momentum and adaptive step sizes.

Croce & Hein 2020, "Reliable evaluation of adversarial robustness with an ensemble of diverse
parameter-free attacks", Algorithm 1; the constants and the details that the text leaves open
are those of its published code, from which all published numbers come. `ascent` is one run from
one start; `Apgd` restarts it, `ApgdTargeted` runs it for every wrong class.

Symbols: x^(k) = the point after k steps, f = its loss, eta = the step size of a row, N = the number
of steps, w = a window: the steps between two reviews of eta.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor

from components.attacks.copies import copied, copies_at_once, join
from components.attacks.gradients import unchecked_gradient
from components.attacks.interface import ActiveRows, AttackResult, BudgetedAttack, Items, Search
from components.attacks.losses import LossFn, cross_entropy, dlr, margin, targeted_dlr
from components.attacks.projections import Ball, ball_around
from components.attacks.settings import ApgdSettings, ApgdTargetedSettings
from components.attacks.starts import random_point, restart_stream
from components.core.settings import settings
from components.core.transfers import put_rows
from components.core.types import Images, Labels, Logits, LogitsFn

MOMENTUM = 0.75  # alpha: weight of the new step; the rest is the previous one
LOSSES: dict[str, LossFn] = {"apgd-ce": cross_entropy, "apgd-dlr": dlr}


@settings
class Apgd(BudgetedAttack, ApgdSettings):
    """APGD on cross-entropy (`apgd-ce`) or on the difference of logits ratio (`apgd-dlr`).

    Each restart gets the rows that are still robust. At each point `eot_iter` gradients are summed;
    for a random model the last of these passes decides.
    """

    def __call__(self, logits_of: LogitsFn, items: Items) -> AttackResult:
        search = Search(logits_of, items)
        loss_of = LOSSES[self.kind]
        search.visit_clean(loss_of(search.clean_logits, items.y))
        for restart in range(self.num_restarts if self.eps > 0 else 0):
            rows = search.robust_rows
            if len(rows) == 0:
                break
            ascent(
                logits_of,
                search,
                self,
                norm=self.norm,
                eps=self.eps,
                start=_start(self, items.take(rows), restart),
                loss_for=lambda rows: loss_of,
                score_of=loss_of,
            )
        return search.result()


@settings
class ApgdTargeted(BudgetedAttack, ApgdTargetedSettings):
    """APGD-T: one run of the targeted ratio per rival class, likeliest at the clean image first.

    There are min(`num_targets`, K - 1) rivals. Any wrong class is a success, not only the target.
    Losses of different targets do not compare: the best point is that of the highest margin. The
    first target, which breaks most, runs alone, the others together (`copies.py`).
    """

    def __call__(self, logits_of: LogitsFn, items: Items) -> AttackResult:
        search = Search(logits_of, items)
        rivals = rank_rivals(search.clean_logits, items.y)[:, : self.num_targets]
        targeted_dlr(search.clean_logits, items.y, rivals[:, 0])  # too few classes: no step
        search.visit_clean(search.clean_margins)
        number, num_runs = 0, rivals.shape[1] if self.eps > 0 else 0
        while number < num_runs and len(rows := search.robust_rows) > 0:
            most = num_runs - number if number > 0 else 1
            count = copies_at_once(len(rows), items.x.shape[1:], most=most)
            numbers = range(number, number + count)
            copies = copied(search, rows, count)
            ascent(
                logits_of,
                copies,
                ApgdSettings(num_steps=self.num_steps),
                norm=self.norm,
                eps=self.eps,
                start=torch.cat([_start(self, items.take(rows), n) for n in numbers]),
                loss_for=partial(_targeted_loss, torch.cat([rivals[rows, n] for n in numbers])),
                score_of=margin,
            )
            join(search, rows, copies)
            number += count
        return search.result()


def _start(attack: Apgd | ApgdTargeted, items: Items, number: int) -> Images:
    """The start of one run, still to be projected."""
    stream = restart_stream(attack.kind, number)
    return _surface_point(items, attack.norm, attack.eps, stream)


def rank_rivals(logits: Logits, y: Labels) -> Labels:
    """(B, K - 1) all classes but `y`, likeliest first, ties to the lowest class."""
    others = logits.scatter(1, y[:, None], -math.inf)
    return others.argsort(dim=1, descending=True, stable=True)[:, :-1]


def review_windows(num_steps: int) -> dict[int, int]:
    """Steps after which eta is reviewed -> length of the window that ends there (sec. 3.1).

    The first window is 22 % of N, each next one 3 % of N shorter, none below 6 %. There is no
    review after the last step.
    """
    window, shrink, shortest = (max(num_steps * percent // 100, 1) for percent in (22, 3, 6))
    windows: dict[int, int] = {}
    step = window
    while step < num_steps:
        windows[step] = window
        window = max(window - shrink, shortest)
        step += window
    return windows


@torch.no_grad()
def ascent(
    logits_of: LogitsFn,
    search: Search,
    schedule: ApgdSettings,
    *,
    norm: str,
    eps: float,
    start: Images,
    loss_for: Callable[[Tensor], LossFn],
    score_of: LossFn,
) -> None:
    """One run of Algorithm 1 on the robust rows of `search`, from the projection of `start`.

    `loss_for` returns the loss of these rows of the batch, `score_of` ranks the points of a row. A
    broken row leaves; the others keep their whole state, so their step sizes are not affected.
    """
    active = search.active()
    ball = ball_around(search.items.x[active.rows], norm=norm, eps=eps)
    state = _initial_state(ball.project(start), eps=eps)
    loss_of, windows = loss_for(active.rows), review_windows(schedule.num_steps)
    for step in range(schedule.num_steps):
        logits = _evaluate(logits_of, active, state, loss_of=loss_of, eot_iter=schedule.eot_iter)
        active.visit(state.point, logits, score_of(logits, active.y))
        if active.is_due(step) and (kept := active.leave()) is not None:
            if len(active) == 0:
                return
            state, ball, loss_of = state.take(kept), ball.take(kept), loss_for(active.rows)
        if step in windows:
            state.review(windows[step], rho=schedule.rho)
        state.advance(ball, share=1.0 if step == 0 else MOMENTUM)
    logits = logits_of(state.point)
    active.visit(state.point, logits, score_of(logits, active.y))
    active.finish()


@dataclass(slots=True)
class _AscentState:
    """The state of the rows that are computed; every tensor has one entry per row."""

    point: Images
    previous: Images  # the previous point
    gradient: Images
    best_point: Images
    best_gradient: Images
    best_loss: Tensor
    loss: Tensor  # at the last evaluated point
    step_size: Tensor  # eta
    num_raises: Tensor  # steps of this window that increased the loss
    reviewed_loss: Tensor  # the best loss at the last review of eta
    halved: Tensor  # bool: whether that review halved eta

    def take(self, kept: Tensor) -> "_AscentState":
        """The rows at these int64 places."""
        return _AscentState(*(getattr(self, field.name)[kept] for field in fields(self)))

    def record(self, losses: Tensor, gradient: Images) -> None:
        """Record loss and gradient at the point.

        After a return to the best point, its successor is compared with the abandoned point, as in
        the published code.
        """
        self.num_raises += losses > self.loss
        better = losses > self.best_loss
        self.best_loss = losses.where(better, self.best_loss)
        put_rows(self.best_point, better, self.point)
        put_rows(self.best_gradient, better, gradient)
        self.loss, self.gradient = losses, gradient

    def review(self, window: int, *, rho: float) -> None:
        """Halve eta of the rows without progress and return them to their best point.

        Conditions 1 and 2 of sec. 3.1: too few steps of the window raised the loss, or neither eta
        nor the best loss has changed since the last review.
        """
        stuck = ~self.halved & (self.best_loss <= self.reviewed_loss)
        self.halved = (self.num_raises <= rho * window) | stuck
        self.step_size = torch.where(self.halved, self.step_size / 2, self.step_size)
        back = _per_row(self.halved, self.point)
        self.point = self.best_point.where(back, self.point)
        self.gradient = self.best_gradient.where(back, self.gradient)
        self.reviewed_loss = self.best_loss
        self.num_raises = torch.zeros_like(self.num_raises)

    def advance(self, ball: Ball, *, share: float) -> None:
        """x^(k+1) = P(x + share * (z - x) + (1 - share) * (x - x^(k-1))), z = P(x + eta * s)."""
        x = self.point
        z = ball.direction(self.gradient).mul_(_per_row(self.step_size, x)).add_(x)
        moved = ball.project(z).sub_(x).mul_(share).add_(x)
        if share < 1:
            moved.add_((x - self.previous).mul_(1 - share))
        self.previous, self.point = x, ball.project(moved)


def _initial_state(start: Images, *, eps: float) -> _AscentState:
    """The state before the start is evaluated: eta = 2 eps.

    Any loss exceeds a best loss of -inf, so condition 2 cannot hold at the first review; no loss
    exceeds a last loss of inf, so the start itself does not count as progress.
    """
    lowest = start.new_full((len(start),), -math.inf)
    return _AscentState(
        point=start,
        previous=start,
        gradient=torch.zeros_like(start),
        best_point=start.clone(),
        best_gradient=torch.zeros_like(start),
        best_loss=lowest,
        loss=-lowest,
        step_size=torch.full_like(lowest, 2 * eps),
        num_raises=torch.zeros_like(lowest, dtype=torch.int64),
        reviewed_loss=lowest,
        halved=torch.zeros_like(lowest, dtype=torch.bool),
    )


def _evaluate(
    logits_of: LogitsFn, active: ActiveRows, state: _AscentState, *, loss_of: LossFn, eot_iter: int
) -> Logits:
    """Record loss and gradient at the point; returns the logits of the last pass.

    Gradients are summed over the passes (expectation over transformation, Athalye et al. 2018):
    steps follow the direction alone, which the mean would not change.
    """
    gradient = None
    for _ in range(eot_iter):
        seen = unchecked_gradient(logits_of, state.point, active.y, loss_of=loss_of)
        active.count_gradients(seen.gradient)
        gradient = seen.gradient if gradient is None else gradient + seen.gradient
    assert gradient is not None
    state.record(seen.losses, gradient)
    active.num_evaluations += (eot_iter - 1) * active.robust  # the visit counts the last pass
    return seen.logits


def _surface_point(items: Items, norm: str, eps: float, stream: str) -> Images:
    """A start at the full distance eps, still to be projected; in l-inf x + eps * t / max|t|."""
    if norm == "l2":
        return random_point(items, norm=norm, eps=eps, stream=stream)
    t = 2 * items.uniform(stream) - 1
    return items.x + eps * t / _per_row(t.abs().flatten(1).amax(dim=1), t)


def _targeted_loss(targets: Labels, rows: Tensor) -> LossFn:
    return partial(targeted_dlr, target=targets[rows])


def _per_row(values: Tensor, images: Images) -> Tensor:
    """(B,) values reshaped to broadcast over (B, C, H, W)."""
    return values.view(-1, *[1] * (images.dim() - 1))
