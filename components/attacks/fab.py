"""FAB: the nearest decision boundary by repeated projection onto its linear model.

Croce & Hein 2020a, "Minimally distorted adversarial examples with a fast adaptive boundary attack",
Algorithm 1, with the constants and the targeted form of AutoAttack (Croce & Hein 2020b). The attack
looks for the smallest change and succeeds where that change fits the budget, so it needs no step
size and does not depend on the scale of the logits.

Symbols: x = clean images, x1 = current points, d = z_t - z_y (positive where class t beats the
label), w = its gradient at x1, delta1 and delta2 = the steps from x1 and from x to the hyperplane
d(x1) + <w, z - x1> = 0 inside the pixel range, alpha = weight of the step from x.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from components.attacks.apgd import rank_rivals
from components.attacks.gradients import check_finite, check_logits, is_zero
from components.attacks.interface import AttackResult, Items, Search, check_budget, check_counts
from components.attacks.losses import margin
from components.attacks.projections import Ball, ball_around
from components.core.types import Images, Labels, Logits, LogitsFn

SHORTEST = 1e-8  # of delta1 and delta2, as released: blind rows (w = 0) then drift back to x
SLOWEST = 1e-300  # far below the slowest pixel of a float32 gradient; pixels with w = 0 never move


@dataclass(frozen=True, slots=True, kw_only=True)
class Fab:
    """Towards the class whose linearised boundary is nearest: one gradient per rival and step."""

    norm: str
    eps: float
    num_steps: int = 100
    num_restarts: int = 1
    alpha_max: float = 0.1
    eta: float = 1.05  # overshoot beyond the hyperplane
    beta: float = 0.9  # share of a successful change that the next step starts from

    def __post_init__(self) -> None:
        check_budget(self.name, norm=self.norm, eps=self.eps)
        check_counts(self.name, num_steps=self.num_steps, num_restarts=self.num_restarts)

    @property
    def name(self) -> str:
        return "fab"

    @torch.no_grad()
    def __call__(self, logits_of: LogitsFn, items: Items) -> AttackResult:
        search = Search(logits_of, items)
        if self.eps > 0:
            run = _Run(self, logits_of, search, ball_around(items.x, norm=self.norm, eps=self.eps))
            for aim, rivals in enumerate(self.aims(search.clean_logits, items.y)):
                for restart in range(self.num_restarts):
                    stream = f"{self.name}/{aim}/{restart}" if restart > 0 else None
                    run.from_start(rivals, stream)
        return search.result()

    def aims(self, logits: Logits, y: Labels) -> Iterator[Tensor]:
        """For each run (B, R) rival classes, of which every step picks the nearest."""
        yield rank_rivals(logits, y)


@dataclass(frozen=True, slots=True, kw_only=True)
class FabTargeted(Fab):
    """Towards one class after the other, the likeliest at the clean image first; any error wins."""

    num_targets: int = 9

    def __post_init__(self) -> None:
        Fab.__post_init__(self)
        check_counts(self.name, num_targets=self.num_targets)

    @property
    def name(self) -> str:
        return "fab-t"

    def aims(self, logits: Logits, y: Labels) -> Iterator[Tensor]:
        yield from torch.split(rank_rivals(logits, y)[:, : self.num_targets], 1, dim=1)


@dataclass(frozen=True, slots=True)
class _Walk:
    """The rows still under attack in one run, packed."""

    rows: Tensor  # (B,) in the whole batch
    items: Items
    rivals: Tensor  # (B, R)
    points: Images  # x1
    nearest: Images  # the misclassified point nearest to x, once `distance` is finite
    distance: Tensor  # (B,)

    def take(self, mask: Tensor) -> "_Walk":
        if bool(mask.all()):
            return self
        return _Walk(
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
    """Runs of one attack on one batch; each sees the rows that the earlier ones left standing."""

    settings: Fab
    logits_of: LogitsFn
    search: Search
    ball: Ball

    def from_start(self, rivals: Tensor, stream: str | None) -> None:
        """`num_steps` steps from x or, given a stream of numbers, from a random point near it."""
        rows = self.search.standing
        items = self.search.items.take(rows)
        walk = _Walk(
            rows=rows,
            items=items,
            rivals=rivals[rows],
            points=items.x if stream is None else self._random_start(items, stream),
            nearest=items.x,
            distance=torch.full_like(items.x[:, 0, 0, 0], math.inf),
        )
        for _ in range(self.settings.num_steps):
            if len(walk.rows) == 0:
                return
            walk = self._step(walk)
        walk = walk.take(walk.distance.isfinite())
        if len(walk.rows) > 0:  # a point just outside may survive the projection into the budget
            self._judge(walk, self.ball.project(walk.nearest, walk.rows))

    def _random_start(self, items: Items, stream: str) -> Images:
        """Half of eps away. Published is half of the row's best change where that is smaller, but
        such rows are broken and have left.
        """
        norm = self.settings.norm
        drawn = 2 * items.uniform(stream) - 1 if norm == "linf" else items.normal(stream)
        length = _lengths(drawn, norm=norm)
        return (items.x + self.settings.eps / 2 * drawn / _per_row(length)).clamp(0, 1)

    def _step(self, walk: _Walk) -> _Walk:
        """To the boundary; from misclassified points part of the way back (backward step)."""
        x = walk.items.x
        points = self._towards(self._nearest_plane(walk), x=x, points=walk.points)
        wrong, standing = self._judge(walk, points)
        change = points - x
        reach = _lengths(change, norm=self.settings.norm)
        closer = wrong & (reach < walk.distance)
        back = x + self.settings.beta * change
        moved = replace(
            walk,
            points=torch.where(_per_row(wrong), back, points),
            nearest=torch.where(_per_row(closer), points, walk.nearest),
            distance=torch.where(closer, reach, walk.distance),
        )
        return moved.take(standing)

    def _nearest_plane(self, walk: _Walk) -> _Plane:
        """Of all rivals the one with the smallest |d| / ||w||_dual, from one forward pass.

        Rivals come one at a time and only the nearest is kept: the gradients of a thousand classes
        would not fit. `input_gradient` would repeat the forward pass for each of them.
        """
        ids, y = walk.items.item_ids, walk.items.y[:, None]
        with torch.enable_grad():
            leaf = walk.points.detach().requires_grad_()
            logits = check_logits(self.logits_of(leaf), ids)
            leads = logits.gather(1, walk.rivals) - logits.gather(1, y)  # (B, R)
            totals = leads.sum(dim=0).unbind()  # sums: rows stay independent
        self.search.num_evaluations[walk.rows] += 1
        value, normal = torch.zeros_like(leads[:, 0]), torch.zeros_like(leaf)
        nearest = torch.full_like(value, math.inf, dtype=torch.float64)
        for rival, total in enumerate(totals):
            more = rival + 1 < len(totals)
            (gradient,) = torch.autograd.grad(total, leaf, retain_graph=more)
            self.search.count_gradients(walk.rows, is_zero(check_finite(gradient, ids)))
            d, dual = leads[:, rival].detach(), _dual_lengths(gradient, norm=self.settings.norm)
            distance = torch.where(dual > 0, d.abs() / dual, math.inf)
            closer = distance < nearest
            value = torch.where(closer, d, value)
            normal = torch.where(_per_row(closer), gradient, normal)
            nearest = torch.where(closer, distance, nearest)
        return _Plane(value, normal)

    def _towards(self, plane: _Plane, *, x: Images, points: Images) -> Images:
        """(1 - alpha) (x1 + eta delta1) + alpha (x + eta delta2): overshot, and drawn towards x."""
        norm, eta = self.settings.norm, self.settings.eta
        wide, clean, w = points.double(), x.double(), plane.normal.double()
        offset = _row_sums((wide - clean).mul_(w))
        delta1 = box_steps(wide, normal=w, gap=-plane.value, norm=norm)
        delta2 = box_steps(clean, normal=w, gap=offset - plane.value, norm=norm)
        a1, a2 = (_lengths(delta, norm=norm).clamp_min(SHORTEST) for delta in (delta1, delta2))
        alpha = _per_row((a1 / (a1 + a2)).clamp_max(self.settings.alpha_max))
        mixed = torch.lerp(wide + eta * delta1, clean + eta * delta2, alpha)
        return mixed.clamp_(0, 1).to(x.dtype)

    def _judge(self, walk: _Walk, points: Images) -> tuple[Tensor, Tensor]:
        """Which points are misclassified, and which rows stand: a success must lie in the ball."""
        logits = check_logits(self.logits_of(points), walk.items.item_ids)
        wrong = logits.argmax(dim=1) != walk.items.y
        fits = (self.ball.project(points, walk.rows) == points).flatten(1).all(dim=1)
        scores = margin(logits, walk.items.y)
        self.search.visit(walk.rows[fits], points[fits], logits[fits], scores[fits])
        self.search.num_evaluations[walk.rows[~fits]] += 1
        return wrong, ~(wrong & fits)


def box_steps(x: Images, *, normal: Images, gap: Tensor, norm: str) -> Tensor:
    """The shortest step from each image with <normal, step> = gap and image + step in [0, 1].

    The box-constrained projection of Croce & Hein 2020a, sec. 3. Every pixel moves in the direction
    that helps, until it meets the range: by t (l-inf) or t |w_i| (l2), with one level t for all
    pixels of an image. Out of reach, the step that comes nearest: every pixel at its end of the
    range. In float64, because squares of gradients near 1e-30 vanish in float32.
    """
    w, gap = normal.double(), gap.double()
    direction = w.sign().mul_(_per_row(gap.sign()))
    room = direction.clamp_min(0).sub_(x).abs_()  # to the end of the range that lies ahead
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
    """(B,) sums over images in float64 and in two stages: one `sum` splits a lone large image over
    threads, and then rounds differently than in a batch.
    """
    return values.sum(dim=-1, dtype=torch.float64).flatten(1).sum(dim=1)


def _per_row(values: Tensor) -> Tensor:
    return values[:, None, None, None]
