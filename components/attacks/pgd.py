"""The evaluation attack: projected gradient ascent that keeps the best point it visited.

Madry et al. 2018, sec. 2.1 (l-inf) and its l2 form with normalised gradients. An item is broken by
any misclassified iterate, so later steps cannot undo a success, and it leaves the batch at once.
`ascend` is the loop of all attacks of this family; a `Walk` says what is raised and how a gradient
becomes a step, and FGSM, momentum and GAMA bring walks of their own.

Random starts belong to items, not to batches, and rows are attacked independently of each other.
What a batch can still change is the rounding of the model's own matrix products, whose order of
summation follows the shape; `in_fixed_batches` fixes that shape.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from components.attacks.gradients import check_logits, input_gradient, is_zero
from components.attacks.interface import AttackResult, Items, Search, check_budget, check_counts
from components.attacks.losses import LossFn, cross_entropy, dlr, kl_divergence, margin
from components.attacks.projections import Ball, ball_around
from components.attacks.starts import random_point, restart_stream
from components.core.errors import CasemateError
from components.core.types import Images, Labels, Logits, LogitsFn

LOSSES: dict[str, LossFn] = {"ce": cross_entropy, "margin": margin, "dlr": dlr}


def in_fixed_batches(logits_of: LogitsFn, *, size: int) -> LogitsFn:
    """`logits_of` that only ever sees `size` rows: longer batches are split, the tail is padded.

    With it an item's result no longer depends on how many rows share its batch, and broken items
    still save work in multiples of `size`. A row's place may still move the rounding of products of
    odd width (seen on CPU with 9 inputs), so the sharded stage also cuts its units the same way
    everywhere. Padding rows are copies of a real row and their logits are dropped.
    """

    def fixed(x: Images) -> Logits:
        num_items = x.shape[0]
        if num_items == size:
            return logits_of(x)
        padding = x[:1].expand(-num_items % size, *x.shape[1:])
        padded = torch.cat([x, padding.detach()])
        logits = [logits_of(part) for part in torch.split(padded, size)]
        return torch.cat(logits)[:num_items]

    return fixed


class Walk:
    """One climb over a batch. `rows` index the batch: state that a walk keeps per item follows them
    when broken items leave.
    """

    def __init__(self, ball: Ball, *, step_size: float, loss_of: LossFn) -> None:
        self.ball, self.step_size, self.loss_of = ball, step_size, loss_of

    def loss(self, logits: Logits, y: Labels, *, rows: Tensor, step: int) -> Tensor:
        """What step number `step` raises."""
        return self.score(logits, y, rows=rows)

    def score(self, logits: Logits, y: Labels, *, rows: Tensor) -> Tensor:
        """What ranks the visited points of an item; the same measure at every step."""
        return self.loss_of(logits, y)

    def move(self, gradient: Images, *, rows: Tensor, step: int) -> Images:
        """What to add to the iterates; the projection follows."""
        return self.step_size * self.ball.direction(gradient)


class _DivergenceWalk(Walk):
    """Raises KL(p(x) || p(x_adv)), away from the clean probabilities rather than from a label."""

    def __init__(self, ball: Ball, *, step_size: float, reference: Tensor) -> None:
        super().__init__(ball, step_size=step_size, loss_of=cross_entropy)
        self.reference = reference

    def score(self, logits: Logits, y: Labels, *, rows: Tensor) -> Tensor:
        return kl_divergence(logits, self.reference[rows])


@torch.no_grad()
def ascend(
    logits_of: LogitsFn, search: Search, walk: Walk, *, rows: Tensor, start: Images, num_steps: int
) -> None:
    """Take `rows` from `start`, inside their balls, through `num_steps` steps.

    Every iterate is judged, and only items that still stand are computed.
    """
    items, x_adv = search.items, start
    for step in range(num_steps):
        if len(rows) == 0:
            return
        point = input_gradient(
            logits_of,
            x_adv,
            items.y[rows],
            loss_of=partial(walk.loss, rows=rows, step=step),
            item_ids=items.ids(rows),
        )
        gradient = point.gradient
        search.count_gradients(rows, is_zero(gradient))
        scores = walk.score(point.logits, items.y[rows], rows=rows)
        standing = search.visit(rows, x_adv, point.logits, scores)
        if not bool(standing.all()):
            rows, x_adv, gradient = rows[standing], x_adv[standing], gradient[standing]
        x_adv = walk.ball.project(x_adv + walk.move(gradient, rows=rows, step=step), rows)
    if len(rows) > 0:  # the last iterate needs no gradient
        logits = check_logits(logits_of(x_adv), items.ids(rows))
        search.visit(rows, x_adv, logits, walk.score(logits, items.y[rows], rows=rows))


def climb(
    logits_of: LogitsFn,
    items: Items,
    *,
    norm: str,
    eps: float,
    num_steps: int,
    num_restarts: int = 1,
    start_of: Callable[[Tensor, int], Images],
    walk_on: Callable[[Search, Ball], Walk],
) -> AttackResult:
    """`ascend` once per restart, each on a new walk and only with the rows that still stand.

    `start_of(rows, restart)` gives points that are projected first. `eps` = 0 returns `x` itself.
    """
    search = Search(logits_of, items)
    ball = ball_around(items.x, norm=norm, eps=eps)
    for restart in range(num_restarts if eps > 0 else 0):
        rows = search.standing
        if len(rows) == 0:
            break
        walk = walk_on(search, ball)
        if restart == 0:  # the clean point competes for the best point, too
            search.scores[rows] = walk.score(search.clean_logits[rows], items.y[rows], rows=rows)
        start = ball.project(start_of(rows, restart), rows)
        ascend(logits_of, search, walk, rows=rows, start=start, num_steps=num_steps)
    return search.result()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pgd:
    """PGD with restarts; `step_size` None means eps / 4, which explores the ball in 20 steps.

    Losses: `ce`, `margin` (the objective of Carlini & Wagner; `kappa` clips it), `dlr`, `kl`.
    """

    norm: str
    eps: float
    loss: str = "ce"
    num_steps: int = 20
    step_size: float | None = None
    num_restarts: int = 1
    random_start: bool = True
    kappa: float | None = None

    def __post_init__(self) -> None:
        check_budget("pgd", norm=self.norm, eps=self.eps)
        check_counts("pgd", num_steps=self.num_steps, num_restarts=self.num_restarts)
        if self.loss not in (known := [*LOSSES, "kl"]):
            raise CasemateError("pgd.loss", self.loss, f"is unknown; choose one of {known}")
        if self.kappa is not None and self.loss != "margin":
            raise CasemateError("pgd.kappa", self.kappa, "would be ignored: loss is not margin")
        if not self.random_start and self.loss == "kl":
            raise CasemateError("pgd.random_start", False, "leaves kl blind: zero gradient at x")
        if not self.random_start and self.num_restarts > 1:
            raise CasemateError("pgd.num_restarts", self.num_restarts, "repeats one fixed start")

    @property
    def name(self) -> str:
        return f"pgd-{self.num_steps}-{self.loss}"

    def __call__(self, logits_of: LogitsFn, items: Items) -> AttackResult:
        return climb(
            logits_of,
            items,
            norm=self.norm,
            eps=self.eps,
            num_steps=self.num_steps,
            num_restarts=self.num_restarts,
            start_of=partial(self._start, items),
            walk_on=self._walk,
        )

    def _start(self, items: Items, rows: Tensor, restart: int) -> Images:
        if not self.random_start:
            return items.x[rows]
        stream = restart_stream("pgd", restart)
        return random_point(items.take(rows), norm=self.norm, eps=self.eps, stream=stream)

    def _walk(self, search: Search, ball: Ball) -> Walk:
        step_size = self.eps / 4 if self.step_size is None else self.step_size
        if self.loss == "kl":
            reference = search.clean_logits.softmax(dim=1)
            return _DivergenceWalk(ball, step_size=step_size, reference=reference)
        loss_of = LOSSES[self.loss]
        if self.kappa is not None:
            loss_of = partial(margin, kappa=self.kappa)
        return Walk(ball, step_size=step_size, loss_of=loss_of)


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
    """One climb from `x + eps * starts`, projected: for callers that draw starts of their own."""
    numbers = tuple(str(row) for row in range(len(x)))
    return climb(
        logits_of,
        Items(x, y, numbers, run_seed=0),
        norm=norm,
        eps=eps,
        num_steps=num_steps,
        start_of=lambda rows, restart: x[rows] + eps * starts[rows].to(x),
        walk_on=lambda search, ball: Walk(ball, step_size=step_size, loss_of=loss_of),
    )


pgd_linf = partial(pgd, norm="linf")
pgd_l2 = partial(pgd, norm="l2")
