"""Square Attack: random search with square-shaped changes, without gradients.

Andriushchenko et al. 2020, Algorithms 1 to 3, with the schedule and the margin loss of the released
AutoAttack (Croce & Hein 2020). Two differences: positions and signs belong to rows instead of being
shared by a batch, so a row's result does not depend on its batch; and positions are inclusive,
so squares reach the last row and column, which the released code never touches.

Small squares often propose a point that the row has already queried, e.g. its current point. Its
margin did not exceed the best one then, and the best one never decreases: the query counts, but the
model (assumed to be deterministic) is not evaluated again. Rows go through their queries
independently, so that every forward pass has new points only.

Symbols: s = side of a square, p = share of the pixels it covers, nu = x_best - x, eta = the pattern
of an l2 square, `gains` and `gives` = the window that gains budget and the one that loses it.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from components.attacks.interface import AttackResult, BudgetedAttack, Items, Search
from components.attacks.losses import margin
from components.attacks.projections import linf_bounds, project_l2
from components.attacks.settings import SquareSettings
from components.core.settings import settings
from components.core.types import Images, LogitsFn
from components.models.logits import check_logits

# p is halved when the query number passes each of these (released AutoAttack, not rescaled)
HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
QUERIES_PER_DRAW = 100  # rows draw for this many queries at once: seeding costs more than drawing
TINY = 1e-12


@settings
class Square(BudgetedAttack, SquareSettings):
    """A start and up to `num_queries` proposals per row; a proposal is kept if the margin grows."""

    @torch.no_grad()
    def __call__(self, logits_of: LogitsFn, items: Items) -> AttackResult:
        search = Search(logits_of, items)
        if self.eps > 0 and len(search.robust_rows) > 0:
            random_search = _RandomSearch(logits_of, search, self)
            random_search.start()
            while len(points := random_search.new_points()) > 0:
                random_search.query(points)
        search.visit_clean(search.clean_margins)  # last: the search starts from random squares
        return search.result()


def square_share(query: int, *, p_init: float) -> float:
    """p at a query: `p_init`, halved once for every threshold below the query's number."""
    return p_init / 2.0 ** bisect_left(HALVINGS, query)


def square_side(share: float, shape: Sequence[int]) -> int:
    """s = round(sqrt(p h w)), at least one pixel and at most the image."""
    height, width = shape[-2:]
    return min(max(round(math.sqrt(share * height * width)), 1), height, width)


class _Squares(Protocol):
    """Starts and proposals of one norm, for the rows it was constructed with."""

    @property
    def num_draws(self) -> int:
        """Number of uniform draws that one row needs for one query."""
        ...

    def take(self, kept: Tensor) -> "_Squares": ...

    def start(self, items: Items) -> Images: ...

    def keys(self, points: Images) -> Tensor | None:
        """(B,) int64, equal for equal points of a row; None if points never repeat."""
        ...

    def propose(self, best: Images, draws: Tensor, *, share: float) -> Images: ...


@dataclass(frozen=True, slots=True)
class _LinfSquares:
    """Algorithm 2: every pixel sits on one of its two bounds, and squares move whole channels.

    From anywhere in the ball, `best` + 2 eps is projected to the upper bound and `best` - 2 eps to
    the lower one, so the bounds are assigned directly.
    """

    low: Images
    high: Images
    key_weights: Tensor  # (C, H, W) random int64

    @classmethod
    def around(cls, x: Images, *, eps: float) -> "_LinfSquares":
        generator = torch.Generator().manual_seed(0)
        weights = torch.randint(-(2**63), 2**63 - 1, x.shape[1:], generator=generator)
        return cls(*linf_bounds(x, eps=eps), weights.to(x.device))

    @property
    def num_draws(self) -> int:
        return 2 + self.low.shape[1]

    def take(self, kept: Tensor) -> "_LinfSquares":
        return _LinfSquares(self.low[kept], self.high[kept], self.key_weights)

    def start(self, items: Items) -> Images:
        """Vertical stripes: one sign for every row, channel and column."""
        _, channels, _, width = items.x.shape
        return self._extreme(items.uniform("square/start", (channels, 1, width)))

    def keys(self, points: Images) -> Tensor:
        """Random sums over the pixels that are high, modulo 2^64: two of 5,000 different points
        have the same key with a probability below 1e-12.
        """
        return torch.where(points == self.high, self.key_weights, 0).flatten(1).sum(dim=1)

    def propose(self, best: Images, draws: Tensor, *, share: float) -> Images:
        window = _Window(draws[:, :2], best.shape, side=square_side(share, best.shape))
        return torch.where(window.mask, self._extreme(draws[:, 2:, None, None]), best)

    def _extreme(self, uniform: Tensor) -> Images:
        return torch.where(uniform < 0.5, self.low, self.high)


@dataclass(frozen=True, slots=True)
class _L2Squares:
    """Algorithm 3: budget is moved from one window to another, and unused budget is added."""

    x: Images
    eps: float

    @property
    def num_draws(self) -> int:
        return 5 + self.x.shape[1]

    def take(self, kept: Tensor) -> "_L2Squares":
        return _L2Squares(self.x[kept], self.eps)

    def start(self, items: Items) -> Images:
        """About 5 x 5 tiles of eta, each with its own direction and with one sign per channel."""
        num_items, channels, height, width = items.x.shape
        side = max(min(height, width) // 5, 1)
        tall, wide = height // side, width // side
        draws = items.uniform("square/start", (channels + 1, tall, wide))[..., None, None]
        pattern = eta(side).to(items.x)
        turned = torch.where(draws[:, :1] < 0.5, pattern.T, pattern)
        tiles = torch.where(draws[:, 1:] < 0.5, -turned, turned)  # (B, C, tall, wide, s, s)
        nu = torch.zeros_like(items.x)
        top, left = (height - tall * side) // 2, (width - wide * side) // 2
        nu[..., top : top + tall * side, left : left + wide * side] = tiles.transpose(3, 4).reshape(
            num_items, channels, tall * side, wide * side
        )
        return self._at_full_length(nu)

    def keys(self, points: Images) -> None:
        return None  # lengths are real numbers

    def propose(self, best: Images, draws: Tensor, *, share: float) -> Images:
        # at least 3 and odd, as released: then eta has a centre on both of its halves
        side = min(max(square_side(share, best.shape), 3) | 1, *best.shape[-2:])
        gains = _Window(draws[:, 0:2], best.shape, side=side)
        gives = _Window(draws[:, 2:4], best.shape, side=side)
        nu = best - self.x
        unused = (self.eps**2 - _norms(nu.flatten(1)) ** 2).clamp_min(0)[..., None, None]
        both = gains.mask | gives.mask
        free = (_channel_norms(nu * both) ** 2 + unused / nu.shape[1]).sqrt()  # per channel
        signs = torch.where(draws[:, 5:, None, None] < 0.5, -1.0, 1.0)
        old = nu * gains.mask
        fresh = signs * gains.place(eta(side).to(nu), turned=draws[:, 4] < 0.5)
        fresh = fresh + old / _channel_norms(old).clamp_min(TINY)
        fresh = fresh / _channel_norms(fresh).clamp_min(TINY) * free
        return self._at_full_length(torch.where(gains.mask, fresh, nu.masked_fill(gives.mask, 0)))

    def _at_full_length(self, nu: Tensor) -> Images:
        length = _norms(nu.flatten(1)).clamp_min(TINY)[..., None, None]
        return project_l2(self.x + self.eps * nu / length, center=self.x, eps=self.eps)


class _RandomSearch:
    """The rows still under attack, packed, with their state."""

    def __init__(self, logits_of: LogitsFn, search: Search, settings: Square) -> None:
        self.logits_of, self.search, self.settings = logits_of, search, settings
        self.rows = search.robust_rows
        self.items = search.items.take(self.rows)
        self.squares: _Squares = (
            _LinfSquares.around(self.items.x, eps=settings.eps)
            if settings.norm == "linf"
            else _L2Squares(self.items.x, settings.eps)
        )
        count = len(self.rows)
        self.next_query = torch.zeros(count, dtype=torch.int64)
        self.draws = torch.empty(count, QUERIES_PER_DRAW, self.squares.num_draws).to(self.items.x)
        self.queried = [set[int]() for _ in range(count)]  # keys of points

    def start(self) -> None:
        """The first point of every row."""
        points = self.squares.start(self.items)
        self._are_new(torch.arange(len(self.rows)), self.squares.keys(points))
        self.query(points)

    def query(self, points: Images) -> None:
        """One forward pass of every row: better points are kept, misclassified rows leave."""
        logits = check_logits(self.logits_of(points), self.items.item_ids)
        scores = margin(logits, self.items.y)
        self._keep(self.search.visit(self.rows, points, logits, scores))

    def new_points(self) -> Images:
        """The next new proposal of every row; rows without one leave."""
        points = self.search.x_adv[self.rows]
        found = torch.zeros(len(self.rows), dtype=torch.bool)
        seeking = torch.arange(len(self.rows))
        while len(seeking := seeking[self.next_query[seeking] < self.settings.num_queries]) > 0:
            squares = self.squares.take(seeking)
            proposals = self._proposals(squares, seeking)
            is_new = self._are_new(seeking, squares.keys(proposals))
            points[seeking[is_new]] = proposals[is_new]
            found[seeking[is_new]] = True
            seeking = seeking[~is_new]
        self._keep(found)
        return points[found]

    def _are_new(self, places: Tensor, keys: Tensor | None) -> Tensor:
        """(B,) bool: which points are new to the rows at `places`; records them."""
        if keys is None:
            return torch.ones(len(places), dtype=torch.bool)
        are_new = []
        for place, key in zip(places.tolist(), keys.tolist(), strict=True):
            known = self.queried[place]
            are_new.append(key not in known)
            known.add(key)
        return torch.tensor(are_new)

    def _proposals(self, squares: _Squares, places: Tensor) -> Images:
        """The proposals of the next query of the rows at `places`; counts the query."""
        queries = self.next_query[places]
        self._draw(places[queries % QUERIES_PER_DRAW == 0])
        best = self.search.x_adv[self.rows[places]]
        draws = self.draws[places, queries % QUERIES_PER_DRAW]
        self.next_query[places] += 1
        shares = [square_share(query, p_init=self.settings.p_init) for query in queries.tolist()]
        if len(set(shares)) == 1:  # usual: rows differ by few queries
            return squares.propose(best, draws, share=shares[0])
        proposals = torch.empty_like(best)
        for share in set(shares):
            own = torch.tensor([place for place, other in enumerate(shares) if other == share])
            proposals[own] = squares.take(own).propose(best[own], draws[own], share=share)
        return proposals

    def _draw(self, places: Tensor) -> None:
        """Draw random numbers for the rows at `places`, which start a new block of queries."""
        blocks = self.next_query[places] // QUERIES_PER_DRAW
        for block in set(blocks.tolist()):
            own = places[blocks == block]
            shape = self.draws.shape[1:]
            self.draws[own] = self.items.take(own).uniform(f"square/queries/{block}", shape)

    def _keep(self, robust: Tensor) -> None:
        if bool(robust.all()):
            return
        kept = robust.nonzero().squeeze(1)
        self.rows, self.items = self.rows[kept], self.items.take(kept)
        self.squares = self.squares.take(kept)
        kept = kept.cpu()
        self.next_query, self.draws = self.next_query[kept], self.draws[kept]
        self.queried = [self.queried[place] for place in kept.tolist()]


def eta(side: int) -> Tensor:
    """(s, s) pattern of unit norm: a positive bump in the upper half, a negative one below.

    Andriushchenko et al. 2020, sec. 3, l2 attack: at Chebyshev distance m from its centre a bump is
    as high as the sum of 1 / (k + 1)^2 over k >= m, up to its edge.
    """
    half = side // 2
    return _unit(torch.cat([_bump(half, side), -_bump(side - half, side)]))


def _bump(height: int, width: int) -> Tensor:
    rows = (torch.arange(height) - height // 2).abs()
    columns = (torch.arange(width) - width // 2).abs()
    distance = torch.maximum(rows[:, None], columns[None])
    terms = 1 / torch.arange(1, max(height, width) // 2 + 2, dtype=torch.float64) ** 2
    return _unit(terms.flip(0).cumsum(0).flip(0)[distance])


class _Window:
    """One square of each row, from two uniform numbers; every position inside the image counts."""

    def __init__(self, uniform: Tensor, shape: Sequence[int], *, side: int) -> None:
        height, width = shape[-2:]
        free = torch.tensor([height - side + 1, width - side + 1], device=uniform.device)
        corner = (uniform.double() * free).long()  # float64: the product stays below `free`
        rows = torch.arange(height, device=uniform.device) - corner[:, :1]  # (B, H)
        columns = torch.arange(width, device=uniform.device) - corner[:, 1:]  # (B, W)
        inside = [(line >= 0) & (line < side) for line in (rows, columns)]
        self.mask = (inside[0][:, :, None] & inside[1][:, None, :])[:, None]  # (B, 1, H, W)
        self._rows = rows.clamp(0, side - 1)[:, :, None]
        self._columns = columns.clamp(0, side - 1)[:, None, :]

    def place(self, pattern: Tensor, *, turned: Tensor) -> Tensor:
        """(B, 1, H, W): `pattern` in the window, transposed where `turned`, and 0 elsewhere."""
        both = torch.stack([pattern, pattern.T])
        chosen = both[turned.long()[:, None, None], self._rows, self._columns]
        return chosen[:, None] * self.mask


def _norms(rows: Tensor) -> Tensor:
    """l2 norms along the last axis, which is kept."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return norms


def _unit(pattern: Tensor) -> Tensor:
    """A pattern at norm one; an empty one (half of a single pixel) stays empty."""
    return pattern / _norms(pattern.flatten()).clamp_min(TINY)


def _channel_norms(images: Tensor) -> Tensor:
    """(B, C, 1, 1) l2 norms of every channel."""
    return _norms(images.flatten(2))[..., None]
