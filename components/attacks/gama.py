"""GAMA-PGD: margin of probabilities, first guided away from a reference prediction.

Sriramanan et al. 2020, "Guided adversarial attack for evaluating and enhancing adversarial
defenses", eq. 2 and Algorithm 1:

    max_{i != y} q_i - q_y + lambda_t * |q - q_ref|_2^2,      q = softmax(z(x_t))

with lambda_t falling linearly from 50 to 0 over the first quarter of the steps, and steps of 2 eps,
divided by ten after 60 % and again after 85 % of them. In the paper's text q_ref belongs to the
clean image, in its code to the start; both are here, and the code's choice is the default.
"""

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from components.attacks.interface import AttackResult, Items, Search, check_budget, check_counts
from components.attacks.losses import margin
from components.attacks.pgd import Walk, climb
from components.attacks.projections import Ball
from components.attacks.starts import random_corner, restart_stream
from components.core.errors import CasemateError
from components.core.types import Images, Labels, Logits, LogitsFn

GUIDANCE = 50.0  # lambda_0
GUIDED_SHARE = 0.25  # of the steps; lambda is 0 after them
DROPS = (0.60, 0.85)  # shares of the steps after which the step size falls to a tenth
REFERENCES = ("start", "clean")


def probability_margin(logits: Logits, y: Labels) -> Tensor:
    """max_{i != y} q_i - q_y: bounded, unlike the margin of logits."""
    return margin(logits.softmax(dim=1), y)


class _GuidedWalk(Walk):
    """`reference` (B, K) are the probabilities q_ref; `at_start` replaces them on the first step,
    whose forward pass gives those of the start anyway.
    """

    def __init__(
        self, ball: Ball, *, eps: float, num_steps: int, reference: Tensor, at_start: bool
    ) -> None:
        super().__init__(ball, step_size=2 * eps, loss_of=probability_margin)
        self.num_steps = num_steps
        self.reference, self.at_start = reference, at_start

    def loss(self, logits: Logits, y: Labels, *, rows: Tensor, step: int) -> Tensor:
        prob = logits.softmax(dim=1)
        if self.at_start and step == 0:
            self.reference[rows] = prob.detach()
        away = (prob - self.reference[rows]).square().sum(dim=1)
        return margin(prob, y) + guidance(step, num_steps=self.num_steps) * away

    def move(self, gradient: Images, *, rows: Tensor, step: int) -> Images:
        drops = sum(step >= share * self.num_steps for share in DROPS)
        return super().move(gradient, rows=rows, step=step) * 0.1**drops


def guidance(step: int, *, num_steps: int) -> float:
    """lambda_t, counted from step 0."""
    return GUIDANCE * max(0.0, 1 - step / (GUIDED_SHARE * num_steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class GamaPgd:
    """GAMA-PGD from random corners of the ball; `reference` is `start` or `clean`."""

    norm: str
    eps: float
    num_steps: int = 100
    num_restarts: int = 1
    reference: str = "start"

    def __post_init__(self) -> None:
        check_budget("gama", norm=self.norm, eps=self.eps)
        check_counts("gama", num_steps=self.num_steps, num_restarts=self.num_restarts)
        if self.reference not in REFERENCES:
            remedy = f"is unknown; choose {' or '.join(REFERENCES)}"
            raise CasemateError("gama.reference", self.reference, remedy)

    @property
    def name(self) -> str:
        return f"gama-{self.num_steps}" + ("" if self.reference == "start" else "-clean")

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
        stream = restart_stream("gama", restart)
        return random_corner(items.take(rows), eps=self.eps, stream=stream)

    def _walk(self, search: Search, ball: Ball) -> Walk:
        return _GuidedWalk(
            ball,
            eps=self.eps,
            num_steps=self.num_steps,
            reference=search.clean_logits.softmax(dim=1),
            at_start=self.reference == "start",
        )
