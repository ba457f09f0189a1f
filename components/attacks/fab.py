"""FAB: the nearest decision boundary by repeated projection onto its linear model.

Croce & Hein 2020a, "Minimally distorted adversarial examples with a fast adaptive boundary attack",
Algorithm 1, with the constants and the targeted form of AutoAttack (Croce & Hein 2020b). The attack
searches for the smallest change and succeeds where that change fits the budget, so it needs no step
size and does not depend on the scale of the logits.

Symbols: x = clean images, x1 = current points, d = z_t - z_y (positive where class t beats the
label), w = its gradient at x1, delta1 and delta2 = the steps from x1 and from x to the hyperplane
d(x1) + <w, z - x1> = 0 inside the pixel range, alpha = weight of the step from x.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from components.attacks.apgd import rank_rivals
from components.attacks.gradients import check_finite, is_zero
from components.attacks.interface import AttackResult, BudgetedAttack, Items, Search
from components.attacks.losses import margin
from components.attacks.projections import Ball, ball_around
from components.attacks.settings import FabSettings, FabTargetedSettings
from components.core.settings import settings
from components.core.types import Images, Labels, Logits, LogitsFn
from components.models.logits import check_logits

SHORTEST = 1e-8  # minimum of |delta1| and |delta2|, as released: rows with w = 0 drift back to x
SLOWEST = 1e-300  # far below the slowest pixel of a float32 gradient; pixels with w = 0 never move


Rivals = Callable[[Logits, Labels], Iterable[Tensor]]
"""Clean logits and labels -> (B, R) rival classes for each run; steps go to the nearest."""


@settings
class Fab(BudgetedAttack, FabSettings):
    """Towards the class whose linearised boundary is nearest: one gradient per rival and step."""

    def __call__(self, logits_of: LogitsFn, items: Items) -> AttackResult:
        return _attack(self, logits_of, items, lambda logits, y: [rank_rivals(logits, y)])


@settings
class FabTargeted(BudgetedAttack, FabTargetedSettings):
    """Towards one class after the other, the likeliest at the clean image first; any wrong class
    is a success.
    """

    def __call__(self, logits_of: LogitsFn, items: Items) -> AttackResult:
        def targets(logits: Logits, y: Labels) -> Iterable[Tensor]:
            return torch.split(rank_rivals(logits, y)[:, : self.num_targets], 1, dim=1)

        return _attack(self, logits_of, items, targets)


@torch.no_grad()
def _attack(
    attack: Fab | FabTargeted, logits_of: LogitsFn, items: Items, rivals_of: Rivals
) -> AttackResult:
    search = Search(logits_of, items)
    search.visit_clean(search.clean_margins)
    if attack.eps > 0:
        ball = ball_around(items.x, norm=attack.norm, eps=attack.eps)
        run = _Run(attack, logits_of, search, ball)
        for number, rivals in enumerate(rivals_of(search.clean_logits, items.y)):
            for restart in range(attack.num_restarts):
                stream = f"{attack.kind}/{number}/{restart}" if restart > 0 else None
                run.from_start(rivals, stream)
    return search.result()


@dataclass(frozen=True, slots=True)
class _State:
    """The rows still under attack in one run, packed."""

    rows: Tensor  # (B,) in the whole batch
    items: Items
    rivals: Tensor  # (B, R)
    points: Images  # x1
    nearest: Images  # the misclassified point nearest to x, once `distance` is finite
    distance: Tensor  # (B,)

    def take(self, mask: Tensor) -> "_State":
        if bool(mask.all()):
            return self
        return _State(
            rows=self.rows[mask],
            items=self.items.take(mask.nonzero().squeeze(1)),
            rivals=self.rivals[mask],
            points=self.points[mask],
            nearest=self.nearest[mask],
            distance=self.distance[mask],
        )


@dataclass(frozen=True, slots=True)
class _Plane:
    """d at the points and its gradient w."""

    value: Tensor  # (B,)
    normal: Images


@dataclass(frozen=True, slots=True)
class _Run:
    """Runs of one attack on one batch; each gets the rows that are robust to the earlier ones."""

    attack: Fab | FabTargeted
    logits_of: LogitsFn
    search: Search
    ball: Ball

    def from_start(self, rivals: Tensor, stream: str | None) -> None:
        """`num_steps` steps from x or, with a random stream, from a random point near x."""
        rows = self.search.robust_rows
        items = self.search.items.take(rows)
        state = _State(
            rows=rows,
            items=items,
            rivals=rivals[rows],
            points=items.x if stream is None else self._random_start(items, stream),
            nearest=items.x,
            distance=torch.full_like(items.x[:, 0, 0, 0], math.inf),
        )
        for _ in range(self.attack.num_steps):
            if len(state.rows) == 0:
                return
            state = self._step(state)
        state = state.take(state.distance.isfinite())
        if len(state.rows) > 0:  # a point just outside may stay wrong after the projection
            self._evaluate(state, self.ball.project(state.nearest, state.rows))

    def _random_start(self, items: Items, stream: str) -> Images:
        """A point at distance eps / 2. The paper uses half of the row's best change if smaller,
        but such rows are broken and no longer attacked.
        """
        norm = self.attack.norm
        drawn = 2 * items.uniform(stream) - 1 if norm == "linf" else items.normal(stream)
        length = _lengths(drawn, norm=norm)
        return (items.x + self.attack.eps / 2 * drawn / _per_row(length)).clamp(0, 1)

    def _step(self, state: _State) -> _State:
        """One step to the boundary; misclassified points then move part of the way back to x."""
        x = state.items.x
        points = self._towards(self._nearest_plane(state), x=x, points=state.points)
        wrong, robust = self._evaluate(state, points)
        change = points - x
        length = _lengths(change, norm=self.attack.norm)
        closer = wrong & (length < state.distance)
        back = x + self.attack.beta * change
        moved = replace(
            state,
            points=torch.where(_per_row(wrong), back, points),
            nearest=torch.where(_per_row(closer), points, state.nearest),
            distance=torch.where(closer, length, state.distance),
        )
        return moved.take(robust)

    def _nearest_plane(self, state: _State) -> _Plane:
        """Plane of the rival with the smallest |d| / ||w||_dual, from one forward pass.

        Rivals are processed one by one and only the nearest is kept: gradients of 1,000 classes
        would not fit in memory. `input_gradient` would repeat the forward pass for each of them.
        """
        ids, y = state.items.item_ids, state.items.y[:, None]
        with torch.enable_grad():
            leaf = state.points.detach().requires_grad_()
            logits = check_logits(self.logits_of(leaf), ids)
            leads = logits.gather(1, state.rivals) - logits.gather(1, y)  # (B, R)
            totals = leads.sum(dim=0).unbind()  # sums: rows stay independent
        self.search.num_evaluations[state.rows] += 1
        value, normal = torch.zeros_like(leads[:, 0]), torch.zeros_like(leaf)
        nearest = torch.full_like(value, math.inf, dtype=torch.float64)
        for rival, total in enumerate(totals):
            more = rival + 1 < len(totals)
            (gradient,) = torch.autograd.grad(total, leaf, retain_graph=more)
            self.search.count_gradients(state.rows, is_zero(check_finite(gradient, ids)))
            d, dual = leads[:, rival].detach(), _dual_lengths(gradient, norm=self.attack.norm)
            distance = torch.where(dual > 0, d.abs() / dual, math.inf)
            closer = distance < nearest
            value = torch.where(closer, d, value)
            normal = torch.where(_per_row(closer), gradient, normal)
            nearest = torch.where(closer, distance, nearest)
        return _Plane(value, normal)

    def _towards(self, plane: _Plane, *, x: Images, points: Images) -> Images:
        """(1 - alpha) (x1 + eta delta1) + alpha (x + eta delta2): overshoots, biased towards x."""
        norm, eta = self.attack.norm, self.attack.eta
        wide, clean, w = points.double(), x.double(), plane.normal.double()
        offset = _row_sums((wide - clean).mul_(w))
        delta1 = box_steps(wide, normal=w, gap=-plane.value, norm=norm)
        delta2 = box_steps(clean, normal=w, gap=offset - plane.value, norm=norm)
        a1, a2 = (_lengths(delta, norm=norm).clamp_min(SHORTEST) for delta in (delta1, delta2))
        alpha = _per_row((a1 / (a1 + a2)).clamp_max(self.attack.alpha_max))
        mixed = torch.lerp(wide + eta * delta1, clean + eta * delta2, alpha)
        return mixed.clamp_(0, 1).to(x.dtype)

    def _evaluate(self, state: _State, points: Images) -> tuple[Tensor, Tensor]:
        """Which points are misclassified, and which rows are robust: a success lies in the ball."""
        logits = check_logits(self.logits_of(points), state.items.item_ids)
        wrong = logits.argmax(dim=1) != state.items.y
        fits = (self.ball.project(points, state.rows) == points).flatten(1).all(dim=1)
        scores = margin(logits, state.items.y)
        self.search.visit(state.rows[fits], points[fits], logits[fits], scores[fits])
        self.search.num_evaluations[state.rows[~fits]] += 1
        return wrong, ~(wrong & fits)


def box_steps(x: Images, *, normal: Images, gap: Tensor, norm: str) -> Tensor:
    """The shortest step from each image with <normal, step> = gap and image + step in [0, 1].

    The box-constrained projection of Croce & Hein 2020a, sec. 3. Every pixel moves in the direction
    that helps, until it meets the range: by t (l-inf) or t |w_i| (l2), with one level t for all
    pixels of an image. Where `gap` cannot be reached, the step that comes nearest: every pixel at
    its end of the range. In float64, because squares of gradients near 1e-30 vanish in float32.
    """
    w, gap = normal.double(), gap.double()
    direction = w.sign().mul_(_per_row(gap.sign()))
    room = direction.clamp_min(0).sub_(x).abs_()  # distance to the end of the range
    size = w.abs()
    target = _per_row(gap.abs())
    if norm == "linf":
        level = _level(room, slopes=size, gains=size * room, target=target)
        return direction.mul_(torch.minimum(level, room))
    level = _level(room / size.clamp_min(SLOWEST), slopes=size**2, gains=size * room, target=target)
    return direction.mul_(torch.minimum(level * size, room))


def _level(stops: Tensor, *, slopes: Tensor, gains: Tensor, target: Tensor) -> Tensor:
    """(B, 1, 1, 1) smallest t with sum_i slopes_i min(t, stops_i) = target, or the last stop.

    The sum is concave and piecewise linear in t, so Newton's steps from 0 never pass the solution
    and end on its piece, where they are exact. Three to five are usual; the published sort of all
    pixels takes longer. `gains` are slopes * stops. Products with `moving` because `where` is five
    times slower on a CPU, where this loop was most of the attack's own time.
    """
    last, most = stops.amax(dim=(1, 2, 3), keepdim=True), _per_row(_row_sums(gains))
    level = torch.zeros_like(target)
    while True:
        moving = (stops - level).clamp_min_(0).sign_()  # 1 where a pixel has not met the range
        rest = target - (most - _per_row(_row_sums(gains * moving)))
        slope = _per_row(_row_sums(slopes * moving))
        further = torch.where(slope > 0, rest / slope, last)
        if not bool((further > level).any()):
            return level
        level = torch.maximum(level, further)


def _lengths(delta: Tensor, *, norm: str) -> Tensor:
    """(B,) norms of whole rows."""
    if norm == "linf":  # `vector_norm` takes eight times as long for it
        return delta.abs().amax(dim=(1, 2, 3))
    lengths: Tensor = torch.linalg.vector_norm(delta.flatten(1), dim=1)
    return lengths


def _dual_lengths(gradient: Images, *, norm: str) -> Tensor:
    """(B,) l1 norms where l-inf is the norm, l2 norms where it is l2, summed in float64."""
    if norm == "linf":
        return _row_sums(gradient.abs())
    lengths: Tensor = torch.linalg.vector_norm(gradient.flatten(1), dim=1, dtype=torch.float64)
    return lengths


def _row_sums(values: Tensor) -> Tensor:
    """(B,) sums over images in float64 and in two stages: one `sum` splits a single large image
    over threads and then rounds differently than in a batch.
    """
    return values.sum(dim=-1, dtype=torch.float64).flatten(1).sum(dim=1)


def _per_row(values: Tensor) -> Tensor:
    return values[:, None, None, None]
