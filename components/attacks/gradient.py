"""FGSM, PGD, MI-FGSM and GAMA-PGD: one loop of projected gradient steps.

- FGSM: Wong et al. 2020, Algorithm 3; step sizes 1.5 eps (one step) and 0.75 eps (two steps) as in
  the published code of Debenedetti et al. 2023, "A Light Recipe to Train Robust Vision
  Transformers";
- PGD: Madry et al. 2018, sec. 2.1 (l-inf), and its l2 form with normalised gradients;
- MI-FGSM: Dong et al. 2018, Algorithm 1;
- GAMA-PGD: Sriramanan et al. 2020, "Guided adversarial attack for evaluating and enhancing
  adversarial defenses", eq. 2 and Algorithm 1.

`gradient_ascent` is the loop. Any misclassified iterate breaks an item, so later steps cannot undo
a success, and the item leaves the batch at once. A `StepRule` defines the loss and how a gradient
becomes a step; an attack defines its starts and its rule.

Random starts belong to items, not to batches, and rows are attacked independently of each other.
A batch can still change the rounding of the model's own matrix products, whose order of summation
follows the shape; `in_fixed_batches` fixes that shape.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from components.attacks.base_settings import GradientSettings
from components.attacks.gradients import Faults, unchecked_gradient
from components.attacks.interface import ActiveRows, AttackResult, BudgetedAttack, Items, Search
from components.attacks.losses import LossFn, cross_entropy, dlr, kl_divergence, margin
from components.attacks.projections import Ball, ball_around, bounds_of_pixels
from components.attacks.settings import FgsmSettings, GamaSettings, MimSettings, PgdSettings
from components.attacks.starts import random_corner, random_point, restart_stream
from components.core.evaluations import EVALUATIONS
from components.core.settings import settings
from components.core.types import Images, Labels, Logits, LogitsFn

START_OFFSET = 1e-5  # added to random starts before projection, as in the FGSM code
LOSSES: dict[str, LossFn] = {"ce": cross_entropy, "margin": margin, "dlr": dlr}
GUIDANCE = 50.0  # lambda_0 of GAMA
GUIDED_SHARE = 0.25  # share of the steps of GAMA with guidance; then lambda is 0
DROPS = (0.60, 0.85)  # shares of the steps after which GAMA divides the step size by ten


def in_fixed_batches(logits_of: LogitsFn, *, size: int) -> LogitsFn:
    """`logits_of` that always gets `size` rows: longer batches are split, the tail is padded.

    An item's result then does not depend on how many rows share its batch, and broken items still
    save work in multiples of `size`. A row's place may still change the rounding of products of odd
    width (seen on CPU with 9 inputs), so the sharded stage also cuts its units the same way
    everywhere. Padding rows are copies of a real row and their logits are dropped.
    """

    def fixed(x: Images) -> Logits:
        num_items = x.shape[0]
        EVALUATIONS.add(num_items)
        if num_items == size:
            return logits_of(x)
        padding = x[:1].expand(-num_items % size, *x.shape[1:])
        padded = torch.cat([x, padding.detach()])
        logits = [logits_of(part) for part in torch.split(padded, size)]
        return torch.cat(logits)[:num_items]

    return fixed


class StepRule:
    """The loss and the steps of one start. `rows` index the whole batch, so state that a rule keeps
    per item stays aligned when broken items leave.
    """

    def __init__(self, ball: Ball, *, step_size: float, loss_of: LossFn) -> None:
        self.ball, self.step_size, self.loss_of = ball, step_size, loss_of

    def loss(self, logits: Logits, y: Labels, *, rows: Tensor, step: int) -> Tensor:
        """(B,) loss that step number `step` increases."""
        return self.score(logits, y, rows=rows)

    def score(self, logits: Logits, y: Labels, *, rows: Tensor) -> Tensor:
        """(B,) rank of the visited points of an item; the same measure at every step."""
        return self.loss_of(logits, y)

    def step(self, gradient: Images, *, rows: Tensor, step: int) -> Images:
        """The change of the iterates, before the projection."""
        return self.step_size * self.ball.direction(gradient)


class _KlRule(StepRule):
    """Increases KL(p(x) || p(x_adv)), the divergence from the clean probabilities; no label."""

    def __init__(self, ball: Ball, *, step_size: float, reference: Tensor) -> None:
        super().__init__(ball, step_size=step_size, loss_of=cross_entropy)
        self.reference = reference

    def score(self, logits: Logits, y: Labels, *, rows: Tensor) -> Tensor:
        return kl_divergence(logits, self.reference[rows])


class _MomentumRule(StepRule):
    """m_{t+1} = mu * m_t + g_t / mean|g_t|,      x_{t+1} = P(x_t + a * direction(m_{t+1})).

    The paper divides by the sum of |g|; the mean differs by a constant factor, which does not
    change the direction.
    """

    def __init__(self, ball: Ball, x: Images, *, step_size: float, decay: float) -> None:
        super().__init__(ball, step_size=step_size, loss_of=cross_entropy)
        self.decay = decay
        self.momentum = torch.zeros_like(x)

    def step(self, gradient: Images, *, rows: Tensor, step: int) -> Images:
        size = gradient.abs().mean(dim=(1, 2, 3), keepdim=True)
        unit = gradient / torch.where(size == 0, torch.ones_like(size), size)
        momentum = self.decay * self.momentum[rows] + unit
        self.momentum[rows] = momentum
        return super().step(momentum, rows=rows, step=step)


class _GuidedRule(StepRule):
    """max_{i != y} q_i - q_y + lambda_t * |q - q_ref|_2^2,      q = softmax(z(x_t)).

    lambda_t falls linearly from 50 to 0 over the first quarter of the steps; the step size is
    divided by ten after 60 % and again after 85 % of them. `reference` (B, K) are the probabilities
    q_ref; `at_start` replaces them on the first step, whose forward pass gives those of the start.
    """

    def __init__(
        self, ball: Ball, *, step_size: float, num_steps: int, reference: Tensor, at_start: bool
    ) -> None:
        super().__init__(ball, step_size=step_size, loss_of=probability_margin)
        self.num_steps = num_steps
        self.reference, self.at_start = reference, at_start

    def loss(self, logits: Logits, y: Labels, *, rows: Tensor, step: int) -> Tensor:
        prob = logits.softmax(dim=1)
        if self.at_start and step == 0:
            self.reference[rows] = prob.detach()
        away = (prob - self.reference[rows]).square().sum(dim=1)
        return margin(prob, y) + guidance(step, num_steps=self.num_steps) * away

    def step(self, gradient: Images, *, rows: Tensor, step: int) -> Images:
        drops = sum(step >= share * self.num_steps for share in DROPS)
        return super().step(gradient, rows=rows, step=step) * 0.1**drops


def probability_margin(logits: Logits, y: Labels) -> Tensor:
    """max_{i != y} q_i - q_y: bounded, unlike the margin of logits."""
    return margin(logits.softmax(dim=1), y)


def guidance(step: int, *, num_steps: int) -> float:
    """lambda_t, counted from step 0."""
    return GUIDANCE * max(0.0, 1 - step / (GUIDED_SHARE * num_steps))


@torch.no_grad()
def gradient_ascent(
    logits_of: LogitsFn,
    search: Search,
    rule: StepRule,
    *,
    rows: Tensor,
    start: Images,
    num_steps: int,
) -> None:
    """`num_steps` projected steps of the robust `rows` from `start`, which lies in their balls.

    Every iterate is evaluated; broken items leave at each step on a CPU, every ten on a GPU.
    """
    active, x_adv, ball = ActiveRows(search, rows), start, rule.ball.take(rows)
    for step in range(num_steps):
        if len(active) == 0:
            return
        loss_of = partial(rule.loss, rows=active.rows, step=step)
        seen = unchecked_gradient(logits_of, x_adv, active.y, loss_of=loss_of)
        gradient = seen.gradient
        active.count_gradients(gradient)
        scores = rule.score(seen.logits, active.y, rows=active.rows)
        active.visit(x_adv, seen.logits, scores)
        if active.is_due(step) and (kept := active.leave()) is not None:
            x_adv, gradient, ball = x_adv[kept], gradient[kept], ball.take(kept)
        x_adv = ball.project(x_adv + rule.step(gradient, rows=active.rows, step=step))
    if len(active) > 0:  # the last iterate needs no gradient
        logits = logits_of(x_adv)
        active.visit(x_adv, logits, rule.score(logits, active.y, rows=active.rows))
        active.finish()


def _with_restarts(
    logits_of: LogitsFn,
    items: Items,
    *,
    norm: str,
    eps: float,
    num_steps: int,
    num_restarts: int,
    start_of: Callable[[Tensor, int], Images],
    rule_of: Callable[[Search, Ball], StepRule],
) -> AttackResult:
    """`gradient_ascent` once per restart, each with a new rule and the rows that are still robust.

    `start_of(rows, restart)` returns points to project. `eps` = 0 returns `x` itself.
    """
    search = Search(logits_of, items)
    ball = ball_around(items.x, norm=norm, eps=eps)
    for restart in range(num_restarts if eps > 0 else 0):
        rows = search.robust_rows
        if len(rows) == 0:
            break
        rule = rule_of(search, ball)
        if restart == 0:
            every = torch.arange(len(items), device=rows.device)
            search.visit_clean(rule.score(search.clean_logits, items.y, rows=every))
        start = ball.take(rows).project(start_of(rows, restart))
        gradient_ascent(logits_of, search, rule, rows=rows, start=start, num_steps=num_steps)
    return search.result()


class GradientAttack(BudgetedAttack, GradientSettings):
    """Base of the attacks in this file, which differ in start and step rule."""

    def __call__(self, logits_of: LogitsFn, items: Items) -> AttackResult:
        return _with_restarts(
            logits_of,
            items,
            norm=self.norm,
            eps=self.eps,
            start_of=lambda rows, restart: self.start(items.take(rows), restart),
            rule_of=self.rule,
            num_steps=self.num_steps,
            num_restarts=self.num_restarts,
        )

    def start(self, items: Items, restart: int) -> Images:
        """The first points, still to be projected: uniform in the l-inf ball or on the l2 sphere;
        the images themselves where `random_start` is off.
        """
        if not self.random_start:
            return items.x
        stream = restart_stream(self.kind, restart)
        return random_point(items, norm=self.norm, eps=self.eps, stream=stream)

    def rule(self, search: Search, ball: Ball) -> StepRule:
        """The step rule of one start."""
        return StepRule(ball, step_size=self.step_size_at(self.eps), loss_of=cross_entropy)


@settings
class Fgsm(GradientAttack, FgsmSettings):
    """FGSM for evaluation; in l2 its steps follow the normalised gradient.

    Without a random start a single step is Goodfellow et al. 2015, sec. 4: a step that is longer
    than `eps` ends at the same point once projected.
    """

    def start(self, items: Items, restart: int) -> Images:
        start = GradientAttack.start(self, items, restart)
        return start + START_OFFSET if self.random_start else start


@settings
class Pgd(GradientAttack, PgdSettings):
    """PGD with restarts on cross-entropy, the margin of logits, DLR or the KL divergence."""

    def rule(self, search: Search, ball: Ball) -> StepRule:
        step_size = self.step_size_at(self.eps)
        if self.loss == "kl":
            reference = search.clean_logits.softmax(dim=1)
            return _KlRule(ball, step_size=step_size, reference=reference)
        loss_of = LOSSES[self.loss]
        if self.kappa is not None:
            loss_of = partial(margin, kappa=self.kappa)
        return StepRule(ball, step_size=step_size, loss_of=loss_of)


@settings
class Mim(GradientAttack, MimSettings):
    """MI-FGSM on the cross-entropy, published with mu = 1, ten steps of eps / 10 from x itself."""

    def rule(self, search: Search, ball: Ball) -> StepRule:
        step_size = self.step_size_at(self.eps)
        return _MomentumRule(ball, search.items.x, step_size=step_size, decay=self.decay)


@settings
class GamaPgd(GradientAttack, GamaSettings):
    """GAMA-PGD from random corners of the ball.

    In the paper's text q_ref is that of the clean image, in its code that of the start; both exist
    here, and the code's choice is the default.
    """

    def start(self, items: Items, restart: int) -> Images:
        return random_corner(items, eps=self.eps, stream=restart_stream(self.kind, restart))

    def rule(self, search: Search, ball: Ball) -> StepRule:
        return _GuidedRule(
            ball,
            step_size=self.step_size_at(self.eps),
            num_steps=self.num_steps,
            reference=search.clean_logits.softmax(dim=1),
            at_start=self.reference == "start",
        )


def pgd(
    logits_of: LogitsFn,
    x: Images,
    y: Labels,
    *,
    norm: str,
    eps: float,
    step_size: float,
    num_steps: int,
    starts: Tensor,
    loss_of: LossFn = cross_entropy,
) -> AttackResult:
    """PGD from the projection of `x + eps * starts`, for callers that draw their own starts."""
    numbers = tuple(str(row) for row in range(len(x)))
    return _with_restarts(
        logits_of,
        Items(x, y, numbers, run_seed=0),
        norm=norm,
        eps=eps,
        num_steps=num_steps,
        num_restarts=1,
        start_of=lambda rows, restart: x[rows] + eps * starts[rows].to(x),
        rule_of=lambda search, ball: StepRule(ball, step_size=step_size, loss_of=loss_of),
    )


pgd_linf = partial(pgd, norm="linf")
pgd_l2 = partial(pgd, norm="l2")


def sign_ascent(
    logits_of: LogitsFn,
    x: Images,
    y: Labels,
    *,
    start: Images,
    eps: float,
    step_size: float,
    num_steps: int,
    loss_of: LossFn = cross_entropy,
    faults: Faults | None = None,
) -> Images:
    """The training attack: the last iterate of sign steps from `start`, projected, in l-inf.

    `eps` = 0, the first epoch of a warm-up, returns `x` itself without a model call. `step_size`
    may exceed `eps`: the projection keeps the result in the ball. Images outside of [0, 1] and
    passes that are not finite are an error at the end, or whenever the caller checks `faults`. Hold
    `attack_mode(model)` around the call.
    """
    if eps == 0:
        return x
    noted = Faults() if faults is None else faults
    noted.note_pixels(x)
    low, high = bounds_of_pixels(x, eps=eps)
    x_adv = start.clamp(low, high)
    for _ in range(num_steps):
        seen = unchecked_gradient(logits_of, x_adv, y, loss_of=loss_of)
        noted.note_pass(seen)
        x_adv = seen.gradient.sign().mul_(step_size).add_(x_adv).clamp_(low, high)
    if faults is None:
        noted.check()
    return x_adv
