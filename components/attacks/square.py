"""Square Attack: random search with square-shaped changes, without gradients.

Andriushchenko et al. 2020, Algorithms 1 to 3, with the schedule and the margin loss of the released
AutoAttack (Croce & Hein 2020). Two differences: positions and signs belong to rows instead of being
shared by a batch, so a row's result does not depend on its batch; and positions are inclusive,
so squares reach the last row and column, which the released code never touches.

A row's draws belong to its query numbers, and few proposals are kept. So several queries ahead are
proposed from the present best point and judged in one pass; the first that improves is kept, and
the later ones are proposed again from there. That is the search query by query: the points and the
number of queries do not depend on how many are made ahead, but for the rounding of the model's own
products. `num_evaluations` counts the queries of that search, also those about points that it has
asked about before, and not the passes that were made ahead in vain. The model is assumed to be
deterministic.

Symbols: s = side of a square, p = share of the pixels it covers, nu = x_best - x, eta = the pattern
of an l2 square, `gains` and `gives` = the window that gains budget and the one that loses it, k =
the queries of a row in one pass.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from components.attacks.interface import ActiveRows, AttackResult, BudgetedAttack, Items, Search
from components.attacks.losses import margin
from components.attacks.projections import L2Ball, linf_bounds
from components.attacks.settings import SquareSettings
from components.core.settings import settings
from components.core.transfers import put_rows
from components.core.types import Images, LogitsFn

# p is halved when the query number passes each of these (released AutoAttack, not rescaled)
HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
QUERIES_PER_DRAW = 100  # rows draw for this many queries at once: seeding costs more than drawing
MOST_AHEAD = 32
ROWS, PIXELS = 184, 600_000  # of all proposals in a pass: the fastest on a CPU, with CIFAR images
DEVICE_ROWS, DEVICE_PIXELS = 1024, 2**26  # the same elsewhere (not measured)
TINY = 1e-12


@settings
class Square(BudgetedAttack, SquareSettings):
    """A start and up to `num_queries` proposals per row; a proposal is kept if the margin grows."""

    @torch.no_grad()
    def __call__(self, logits_of: LogitsFn, items: Items) -> AttackResult:
        search = Search(logits_of, items)
        if self.eps > 0 and len(search.robust_rows) > 0:
            _RandomSearch(logits_of, search.active(), self).run()
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

    def propose(self, draws: Tensor, shares: Tensor) -> Images:
        """(B * k, C, H, W): k proposals of each row from its best point; `draws` are (B, k, D),
        `shares` (B, k) places in the table of shares.
        """
        ...

    def accept(self, which: Tensor, improved: Tensor) -> Images:
        """The best points after proposal number `which` (B,) of the rows that `improved` (bool)."""
        ...


class _LinfSquares:
    """Algorithm 2: every pixel sits on one of its two bounds, and squares move whole channels.

    From anywhere in the ball, `best` + 2 eps is projected to the upper bound and `best` - 2 eps to
    the lower one, so the bounds are assigned directly.
    """

    def __init__(self, low: Images, high: Images, sides: Tensor, is_high: Tensor) -> None:
        self.low, self.high, self.sides = low, high, sides
        self.is_high = is_high  # (B, C, H, W) bool: the bound of each pixel of the best points
        self.proposed = is_high[:, None]

    @classmethod
    def around(cls, x: Images, *, eps: float, shares: Sequence[float]) -> "_LinfSquares":
        sides = torch.tensor([square_side(share, x.shape) for share in shares], device=x.device)
        return cls(*linf_bounds(x, eps=eps), sides, torch.zeros_like(x, dtype=torch.bool))

    @property
    def num_draws(self) -> int:
        return 2 + self.low.shape[1]

    def take(self, kept: Tensor) -> "_LinfSquares":
        return _LinfSquares(self.low[kept], self.high[kept], self.sides, self.is_high[kept])

    def start(self, items: Items) -> Images:
        """Vertical stripes: one sign for every row, channel and column."""
        _, channels, _, width = items.x.shape
        stripes = items.uniform("square/start", (channels, 1, width)) >= 0.5
        self.is_high = stripes.expand(self.low.shape).clone()
        return torch.where(self.is_high, self.high, self.low)

    def propose(self, draws: Tensor, shares: Tensor) -> Images:
        window = _Window(draws[..., :2], self.low.shape, side=self.sides[shares])
        signs = (draws[..., 2:] >= 0.5)[..., None, None]
        self.proposed = torch.where(window.mask, signs, self.is_high[:, None])
        return torch.where(self.proposed, self.high[:, None], self.low[:, None]).flatten(0, 1)

    def accept(self, which: Tensor, improved: Tensor) -> Images:
        rows = torch.arange(len(which), device=which.device)
        put_rows(self.is_high, improved, self.proposed[rows, which])
        return torch.where(self.is_high, self.high, self.low)


class _L2Squares:
    """Algorithm 3: budget is moved from one window to another, and unused budget is added."""

    def __init__(
        self, x: Images, eps: float, best: Images, sides: Tensor, patterns: Tensor
    ) -> None:
        self.x, self.eps, self.best, self.proposed = x, eps, best, best[:, None]
        self.sides = sides  # (S,) by place in the table of shares
        self.patterns = patterns  # (S, 2, s, s): eta of that side and transposed, zeros around it

    @classmethod
    def around(cls, x: Images, *, eps: float, shares: Sequence[float]) -> "_L2Squares":
        # at least 3 and odd, as released: then eta has a centre on both of its halves
        sides = [min(max(square_side(share, x.shape), 3) | 1, *x.shape[-2:]) for share in shares]
        patterns = torch.zeros(len(sides), 2, max(sides), max(sides))
        for both, side in zip(patterns, sides, strict=True):
            pattern = eta(side).float()
            both[:, :side, :side] = torch.stack([pattern, pattern.T])
        table = torch.tensor(sides, device=x.device)
        return cls(x, eps, x.clone(), table, patterns.to(x.device))

    @property
    def num_draws(self) -> int:
        return 5 + self.x.shape[1]

    def take(self, kept: Tensor) -> "_L2Squares":
        return _L2Squares(self.x[kept], self.eps, self.best[kept], self.sides, self.patterns)

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
        self.best = self._at_full_length(nu, self.x)
        return self.best.clone()

    def propose(self, draws: Tensor, shares: Tensor) -> Images:
        ahead, draws, shares = draws.shape[1], draws.flatten(0, 1), shares.flatten()
        x, best = (images.repeat_interleave(ahead, dim=0) for images in (self.x, self.best))
        nu, side = best - x, self.sides[shares]
        gains = _Window(draws[:, 0:2], best.shape, side=side)
        gives = _Window(draws[:, 2:4], best.shape, side=side)
        unused = (self.eps**2 - _norms(nu.flatten(1)) ** 2).clamp_min(0)[..., None, None]
        both = gains.mask | gives.mask
        free = (_channel_norms(nu * both) ** 2 + unused / nu.shape[1]).sqrt()  # per channel
        signs = torch.where(draws[:, 5:, None, None] < 0.5, -1.0, 1.0)
        old = nu * gains.mask
        fresh = signs * gains.place(self.patterns, shares, turned=draws[:, 4] < 0.5)
        fresh = fresh + old / _channel_norms(old).clamp_min(TINY)
        fresh = fresh / _channel_norms(fresh).clamp_min(TINY) * free
        points = torch.where(gains.mask, fresh, nu.masked_fill(gives.mask, 0))
        points = self._at_full_length(points, x)
        self.proposed = points.view(-1, ahead, *x.shape[1:])
        return points

    def accept(self, which: Tensor, improved: Tensor) -> Images:
        rows = torch.arange(len(which), device=which.device)
        put_rows(self.best, improved, self.proposed[rows, which])
        return self.best

    def _at_full_length(self, nu: Tensor, x: Images) -> Images:
        length = _norms(nu.flatten(1)).clamp_min(TINY)[..., None, None]
        return L2Ball(x, self.eps).project(x + self.eps * nu / length)


class _RandomSearch:
    """The rows still under attack, packed, with their state; each at its own query."""

    def __init__(self, logits_of: LogitsFn, active: ActiveRows, settings: Square) -> None:
        self.logits_of, self.active, self.settings = logits_of, active, settings
        self.items = active.search.items.take(active.rows)
        numbers = range(settings.num_queries)
        shares = [square_share(query, p_init=settings.p_init) for query in numbers]
        distinct = sorted(set(shares), reverse=True)
        x, places = self.items.x, {share: place for place, share in enumerate(distinct)}
        kind = _LinfSquares if settings.norm == "linf" else _L2Squares
        self.squares: _Squares = kind.around(x, eps=settings.eps, shares=distinct)
        self.shares = torch.tensor([places[share] for share in shares], device=x.device)
        self.query = torch.zeros_like(active.rows)  # the next one of each row
        self.draws = x.new_empty(len(x), 0, self.squares.num_draws)
        self.furthest = 0  # no row is beyond this query
        self.on_cpu = x.device.type == "cpu"

    def run(self) -> None:
        """The start, then all queries."""
        active, number = self.active, 0
        points = self.squares.start(self.items)
        logits = self.logits_of(points)
        active.visit(points, logits, margin(logits, active.y))
        self._leave()
        if not self.on_cpu:  # later it would wait for the copies
            self._draw(self.settings.num_queries)
        while len(active) > 0:
            self._ask(self._num_ahead())
            if active.is_due(number):
                self._leave()
            number += 1

    def _num_ahead(self) -> int:
        """k: as many as make a batch that the device is fast with."""
        x, count = self.items.x, len(self.active)
        rows, pixels = (ROWS, PIXELS) if self.on_cpu else (DEVICE_ROWS, DEVICE_PIXELS)
        ahead = min(rows // count, pixels // (count * x[0].numel()), MOST_AHEAD)
        return max(min(ahead, self.settings.num_queries), 1)

    def _ask(self, ahead: int) -> None:
        """One pass with so many queries of every row; the first that improves it is kept."""
        active, last = self.active, self.settings.num_queries - 1
        self._draw(self.furthest + ahead)
        numbers = self.query[:, None] + torch.arange(ahead, device=self.query.device)  # (B, k)
        is_asked, at = numbers <= last, numbers.clamp_max(last)
        rows = torch.arange(len(active), device=at.device)
        points = self.squares.propose(self.draws[rows[:, None], at], self.shares[at])
        logits = self.logits_of(points)
        labels = active.y[:, None].expand(-1, ahead).flatten()
        scores = margin(logits, labels).view(-1, ahead)
        wrong = (logits.argmax(dim=1) != labels).view(-1, ahead)
        better = is_asked & (wrong | (scores > active.scores[:, None]))
        improved, which = better.any(dim=1), better.int().argmax(dim=1)
        asked = is_asked & ((numbers - self.query[:, None] <= which[:, None]) | ~improved[:, None])
        finite = logits.isfinite().all(dim=1).view(-1, ahead)
        active.note_finite((finite | ~asked).all(dim=1))
        active.visit(
            self.squares.accept(which, improved & active.robust),
            logits.view(len(active), ahead, -1)[rows, which],
            scores[rows, which],
            allowed=improved,
            num_evaluations=asked.sum(dim=1),
        )
        self.query = self.query + asked.sum(dim=1)
        self.furthest += ahead

    def _draw(self, count: int) -> None:
        """Have the random numbers of the first `count` queries."""
        while self.draws.shape[1] < min(count, self.settings.num_queries):
            block = self.draws.shape[1] // QUERIES_PER_DRAW
            shape = (QUERIES_PER_DRAW, self.squares.num_draws)
            drawn = self.items.uniform(f"square/queries/{block}", shape).to(self.draws)
            self.draws = torch.cat([self.draws, drawn], dim=1)

    def _leave(self) -> None:
        """Take out broken rows and those that have made all queries."""
        kept = self.active.leave(self.query >= self.settings.num_queries)
        if kept is None:
            return
        self.items, self.squares = self.items.take(kept), self.squares.take(kept)
        self.query, self.draws = self.query[kept], self.draws[kept]


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
    """One square for each pair of uniform numbers; every position inside the image counts."""

    def __init__(self, uniform: Tensor, shape: Sequence[int], *, side: Tensor) -> None:
        """`uniform` is (..., 2), `side` (...)."""
        side = side[..., None]
        lengths = [torch.arange(length, device=uniform.device) for length in shape[-2:]]
        free = torch.cat([len(line) - side + 1 for line in lengths], dim=-1)
        corner = (uniform.double() * free).long()  # float64: the product stays below `free`
        rows, columns = (line - corner[..., axis : axis + 1] for axis, line in enumerate(lengths))
        inside = [(line >= 0) & (line < side) for line in (rows, columns)]  # (..., H), (..., W)
        mask = inside[0][..., :, None] & inside[1][..., None, :]
        self.mask = mask.unsqueeze(-3)  # (..., 1, H, W)
        self._rows = torch.minimum(rows.clamp_min(0), side - 1)
        self._columns = torch.minimum(columns.clamp_min(0), side - 1)

    def place(self, patterns: Tensor, which: Tensor, *, turned: Tensor) -> Tensor:
        """(B, 1, H, W): a pattern in each window, transposed where `turned`, and 0 elsewhere."""
        chosen = patterns[
            which[:, None, None],
            turned.long()[:, None, None],
            self._rows[:, :, None],
            self._columns[:, None, :],
        ]
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
