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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from components.attacks.apgd import rank_rivals
from components.attacks.copies import copied, copies_at_once, join
from components.attacks.interface import ActiveRows, AttackResult, BudgetedAttack, Items, Search
from components.attacks.losses import margin
from components.attacks.projections import Ball, ball_around
from components.attacks.settings import FabSettings, FabTargetedSettings
from components.core.settings import settings
from components.core.transfers import put_rows
from components.core.types import Images, Labels, Logits, LogitsFn

SHORTEST = 1e-8  # minimum of |delta1| and |delta2|, as released: rows with w = 0 drift back to x
STARTS_AT_ONCE = 8  # runs that share a batch on a GPU
NEWTON_STEPS = 4  # on a GPU between two looks at whether they change anything
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
    starts = [
        (number, restart, rivals)
        for number, rivals in enumerate(rivals_of(search.clean_logits, items.y))
        for restart in range(attack.num_restarts)
    ]
    while attack.eps > 0 and starts and len(rows := search.robust_rows) > 0:
        count = _starts_at_once(rows, items)
        now, starts = starts[:count], starts[count:]
        copies = copied(search, rows, len(now))
        own = items.take(rows)
        points = torch.cat([_start(attack, own, number, again) for number, again, _ in now])
        state = _initial_state(
            attack, copies.items.x, points, torch.cat([r[rows] for *_, r in now])
        )
        _Run(attack, logits_of, copies.active()).go(state)
        join(search, rows, copies)
    return search.result()


def _starts_at_once(rows: Tensor, items: Items) -> int:
    """On a CPU one: more leave its caches, which costs what fewer passes save (measured)."""
    if rows.device.type == "cpu":
        return 1
    return copies_at_once(len(rows), items.x.shape[1:], most=STARTS_AT_ONCE)


def _start(attack: Fab | FabTargeted, items: Items, number: int, restart: int) -> Images:
    """The images themselves; for later restarts a random point at distance eps / 2 of each.

    The paper uses half of the row's best change if smaller, but such rows are broken and no longer
    attacked.
    """
    if restart == 0:
        return items.x
    stream = f"{attack.kind}/{number}/{restart}"
    drawn = 2 * items.uniform(stream) - 1 if attack.norm == "linf" else items.normal(stream)
    length = _lengths(drawn, norm=attack.norm)
    return (items.x + attack.eps / 2 * drawn / _per_row(length)).clamp(0, 1)


@dataclass(frozen=True, slots=True)
class _State:
    """The rows that are computed in one run, packed."""

    x: Images
    rivals: Tensor  # (B, R)
    points: Images  # x1
    nearest: Images  # the misclassified point nearest to x, once `distance` is finite
    distance: Tensor  # (B,)
    ball: Ball

    def take(self, kept: Tensor) -> "_State":
        """The rows at these int64 places."""
        return _State(
            x=self.x[kept],
            rivals=self.rivals[kept],
            points=self.points[kept],
            nearest=self.nearest[kept],
            distance=self.distance[kept],
            ball=self.ball.take(kept),
        )


def _initial_state(attack: Fab | FabTargeted, x: Images, points: Images, rivals: Tensor) -> _State:
    far = torch.full_like(x[:, 0, 0, 0], math.inf)
    ball = ball_around(x, norm=attack.norm, eps=attack.eps)
    return _State(x, rivals, points, x.clone(), far, ball)


@dataclass(frozen=True, slots=True)
class _Plane:
    """d at the points and its gradient w."""

    value: Tensor  # (B,)
    normal: Images


@dataclass(frozen=True, slots=True)
class _Run:
    """One run from each row's start."""

    attack: Fab | FabTargeted
    logits_of: LogitsFn
    active: ActiveRows

    def go(self, state: _State) -> None:
        """`num_steps` steps; then the nearest misclassified points, projected."""
        for step in range(self.attack.num_steps):
            state = self._step(state)
            if self.active.is_due(step) and (kept := self.active.leave()) is not None:
                if len(kept) == 0:
                    return
                state = state.take(kept)
        if (kept := self.active.leave(~state.distance.isfinite())) is not None:
            state = state.take(kept)
        if len(self.active) > 0:  # a point just outside may stay wrong after the projection
            self._evaluate(state, state.ball.project(state.nearest))
            self.active.finish()

    def _step(self, state: _State) -> _State:
        """One step to the boundary; misclassified points then move part of the way back to x."""
        points = self._towards(self._nearest_plane(state), x=state.x, points=state.points)
        change = points - state.x
        length = _lengths(change, norm=self.attack.norm)
        wrong = self._evaluate(state, points, length)
        closer = wrong & (length < state.distance)
        back = change.mul_(self.attack.beta).add_(state.x)
        put_rows(state.nearest, closer, points)
        put_rows(points, wrong, back)
        return replace(state, points=points, distance=torch.where(closer, length, state.distance))

    def _nearest_plane(self, state: _State) -> _Plane:
        """Plane of the rival with the smallest |d| / ||w||_dual, from one forward pass.

        Rivals are processed one by one and only the nearest is kept: gradients of 1,000 classes
        would not fit in memory. `input_gradient` would repeat the forward pass for each of them.
        """
        with torch.enable_grad():
            leaf = state.points.detach().requires_grad_()
            logits = self.logits_of(leaf)
            own = logits.gather(1, self.active.y[:, None])
            leads = logits.gather(1, state.rivals) - own  # (B, R)
            totals = leads.sum(dim=0).unbind()  # sums: rows stay independent
        self.active.note_finite(logits.isfinite().all(dim=1))
        self.active.num_evaluations += self.active.robust
        gradients = self._gradients(totals, leaf)
        if len(totals) == 1:
            return _Plane(leads[:, 0].detach(), next(gradients))
        value, normal = torch.zeros_like(leads[:, 0]), torch.zeros_like(leaf)
        nearest = torch.full_like(value, math.inf, dtype=torch.float64)
        for d, gradient in zip(leads.detach().unbind(dim=1), gradients, strict=True):
            dual = _dual_lengths(gradient, norm=self.attack.norm)
            distance = torch.where(dual > 0, d.abs() / dual, math.inf)
            closer = distance < nearest
            value = torch.where(closer, d, value)
            normal = torch.where(_per_row(closer), gradient, normal)
            nearest = torch.where(closer, distance, nearest)
        return _Plane(value, normal)

    def _gradients(self, totals: Sequence[Tensor], leaf: Images) -> Iterator[Images]:
        for number, total in enumerate(totals, start=1):
            (gradient,) = torch.autograd.grad(total, leaf, retain_graph=number < len(totals))
            self.active.count_gradients(gradient)
            yield gradient

    def _towards(self, plane: _Plane, *, x: Images, points: Images) -> Images:
        """(1 - alpha) (x1 + eta delta1) + alpha (x + eta delta2): overshoots, biased towards x.

        Both steps are computed in one batch. In l-inf images are float32 and sums over them float64
        (next points within 1e-7 of those in float64); in l2 all is float64, for squares.
        """
        norm = self.attack.norm
        value, w = _unit_plane(plane, torch.float32 if norm == "linf" else torch.float64)
        both = torch.cat([points, x]).to(w.dtype)
        offset = _row_sums((both[: len(x)] - both[len(x) :]).mul_(w))
        gap = torch.cat([-value, offset - value])
        delta = box_steps(both, normal=torch.cat([w, w]), gap=gap, norm=norm)
        a1, a2 = _lengths(delta, norm=norm).clamp_min(SHORTEST).chunk(2)
        alpha = _per_row((a1 / (a1 + a2)).clamp_max(self.attack.alpha_max))
        end1, end2 = both.add_(delta, alpha=self.attack.eta).chunk(2)
        return torch.lerp(end1, end2, alpha).clamp_(0, 1).to(x.dtype)

    def _evaluate(self, state: _State, points: Images, length: Tensor | None = None) -> Tensor:
        """(B,) bool: which points are misclassified; a success lies in the ball as well.

        Most points lie beyond the ball by their `length`: a CPU then skips the exact comparison.
        """
        logits, active, on_cpu = self.logits_of(points), self.active, points.device.type == "cpu"
        if on_cpu and length is not None and bool((length > self.attack.eps).all()):
            fits = torch.zeros_like(active.robust)
        else:
            fits = (state.ball.project(points) == points).flatten(1).all(dim=1)
        active.visit(points, logits, margin(logits, active.y), allowed=fits)
        return logits.argmax(dim=1) != active.y


def _unit_plane(plane: _Plane, dtype: torch.dtype) -> tuple[Tensor, Images]:
    """(B,) float64 d and w, both divided by the largest entry of w, so that w fits any precision.

    Where w = 0, or so small that it has few digits, no step depends on the scale.
    """
    largest = plane.normal.abs().amax(dim=(1, 2, 3)).clamp_min(torch.finfo(torch.float32).tiny)
    return plane.value.double() / largest.double(), plane.normal.to(dtype) / _per_row(largest)


def box_steps(x: Images, *, normal: Images, gap: Tensor, norm: str) -> Tensor:
    """The shortest step from each image with <normal, step> = gap and image + step in [0, 1].

    The box-constrained projection of Croce & Hein 2020a, sec. 3. Every pixel moves in the direction
    that helps, until it meets the range: by t (l-inf) or t |w_i| (l2), with one level t for all
    pixels of an image. Where `gap` cannot be reached, the step that comes nearest: every pixel at
    its end of the range. Pixels have the dtype of `x`, sums are float64; in l2, x and w should be.
    """
    w, gap = normal, gap.double()
    direction = w.sign().mul_(_per_row(gap.sign()))
    room = direction.clamp_min(0).sub_(x).abs_()  # distance to the end of the range
    size = w.abs()
    target = gap.abs()
    if norm == "linf":
        level = _per_row(_level(room, slopes=size, gains=size * room, target=target))
        return direction.mul_(torch.minimum(level, room))
    stops = room / size.clamp_min(SLOWEST)
    level = _per_row(_level(stops, slopes=size**2, gains=size * room, target=target))
    return direction.mul_(torch.minimum(level * size, room))


def _level(stops: Tensor, *, slopes: Tensor, gains: Tensor, target: Tensor) -> Tensor:
    """(B,) smallest t with sum_i slopes_i min(t, stops_i) = target, or the last stop.

    The sum is concave and piecewise linear in t, so Newton's steps from 0 never pass the solution
    and end on its piece, where they are exact. Three to five are usual; the published sort of all
    pixels takes longer. `gains` are slopes * stops. Further steps change nothing, so a GPU is asked
    less often whether it is done. Products with `moving` because `where` is slower on a CPU.
    """
    last, most = stops.amax(dim=(1, 2, 3)), _row_sums(gains)
    level, moving = torch.zeros_like(last), torch.empty_like(stops)
    steps = 1 if stops.device.type == "cpu" else NEWTON_STEPS
    while True:
        before = level
        for _ in range(steps):
            torch.gt(stops, _per_row(level), out=moving)  # 1 where a pixel has not met the range
            rest = target - (most - _row_sums(gains * moving))
            slope = _row_sums(slopes * moving)
            further = torch.where(slope > 0, rest / slope, last.double()).to(level.dtype)
            level = torch.maximum(level, further)
        if not bool((level > before).any()):
            return level


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
