"""Interface of attacks: rows with their own random numbers in, a result for each row out.

An attack is a frozen dataclass of settings with a budget, called with a model and the rows under
attack. `Search` records what an attack that visits points has found: which rows are still robust,
at what cost, and the best point of each row. Robust accuracy counts the rows that are classified
correctly before and after, over all rows.

The best point of a row, the same for every attack and every list of attacks:
- the first misclassified point that was visited inside the budget;
- without one, the point of highest score of all that were visited inside the budget, the clean
  image included: a robust row is returned unchanged only if no visited point has a higher score;
- the clean image itself if it is misclassified: such rows are not attacked.
The score is the loss that the attack increases. It is the margin of logits, max_{i != y} z_i - z_y,
if an attack has no single loss (apgd-t, fab, poses, attacks of users) and wherever points of
different attacks are compared (lists, ensembles, attention scaling).

The challenges of certificates have functions of their own: `patch.py` returns the patch that leaves
the label the smallest lead of votes, `smoothed.py` the last iterate, as published: the loss of a
smoothed vote is only estimated, from new draws at each step.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from components.attacks.base_settings import AttackSettings, Norm
from components.attacks.gradients import UNUSABLE
from components.attacks.losses import margin
from components.core.errors import CasemateError
from components.core.seeding import generator_for
from components.core.settings import NonNegative, Problem
from components.core.transfers import put_rows
from components.core.types import Images, Labels, Logits, LogitsFn
from components.models.logits import NOT_FINITE, check_logits

POINTS = ("x_adv", "scores", "margins", "prediction")  # of the best point of a row
COUNTS = ("num_evaluations", "num_gradients", "num_zero_gradients")
STEPS_BETWEEN_LOOKS = 10  # of a loop on a GPU, which would wait for a host that looks at each step


@dataclass(frozen=True, slots=True)
class Items:
    """Rows under attack; all randomness of a row is a function of (run_seed, stream, its item id).

    Hence a row gets the same random numbers in any batch. Soft targets (mixup, cutmix) become the
    class with the largest share.
    """

    x: Images
    y: Labels
    item_ids: tuple[str, ...]
    run_seed: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "y", hard_labels(self.y))
        if not len(self.x) == len(self.y) == len(self.item_ids):
            counts = (len(self.x), len(self.y), len(self.item_ids))
            raise ValueError(f"images, labels and item ids differ in number: {counts}")

    def __len__(self) -> int:
        return len(self.item_ids)

    def take(self, rows: Tensor) -> "Items":
        """The rows at these int64 indices, in this order."""
        return Items(self.x[rows], self.y[rows], self.ids(rows), self.run_seed)

    def ids(self, rows: Tensor) -> tuple[str, ...]:
        """The item ids at these indices."""
        return tuple(self.item_ids[row] for row in rows.tolist())

    def generator(self, row: int, stream: str) -> torch.Generator:
        """The CPU generator of one row."""
        return generator_for(self.run_seed, stream, self.item_ids[row])

    def uniform(self, stream: str, shape: Sequence[int] | None = None) -> Tensor:
        """(B, *shape) float32 on [0, 1), by default of an image's shape, on the images' device."""
        return self._draw(torch.rand, stream, shape)

    def normal(self, stream: str, shape: Sequence[int] | None = None) -> Tensor:
        """(B, *shape) standard normals, otherwise as `uniform`."""
        return self._draw(torch.randn, stream, shape)

    def _draw(self, sample: "_Sampler", stream: str, shape: Sequence[int] | None) -> Tensor:
        size = tuple(self.x.shape[1:] if shape is None else shape)
        draws = torch.empty(len(self), *size)
        for row in range(len(self)):
            sample(size, generator=self.generator(row, stream), out=draws[row])
        return draws.to(self.x.device)


class _Sampler(Protocol):
    def __call__(
        self, size: tuple[int, ...], *, generator: torch.Generator, out: Tensor
    ) -> Tensor: ...


def hard_labels(targets: Tensor) -> Labels:
    """(B,) classes; for soft targets (B, K) that of the largest share, ties to the lowest class."""
    return targets.argmax(dim=1) if targets.dim() == 2 else targets


@dataclass(frozen=True, slots=True)
class AttackResult:
    """Result of one attack for each row; `x_adv` is its best point as this module defines it."""

    x_adv: Images
    clean_prediction: Labels
    adversarial_prediction: Labels  # the model's prediction at `x_adv`
    num_evaluations: Tensor  # (B,) int64 forward passes, the clean one included
    num_gradients: Tensor  # (B,) int64 gradient evaluations
    num_zero_gradients: Tensor  # (B,) int64 gradients that are zero everywhere
    margins: Tensor | None = None  # (B,) of logits at `x_adv`; None only from a user's own class

    @property
    def known_margins(self) -> Tensor:
        """(B,) margins of logits at `x_adv`."""
        if self.margins is None:
            raise ValueError("the result of an attack has no margins; return `Search.result()`")
        return self.margins


@runtime_checkable
class Attack(Protocol):
    """Settings that can be called. Hold `attack_mode(model)` around the call."""

    @property
    def name(self) -> str:
        """Short name, different for each family of settings: `pgd-20-ce`, `apgd-t`, `square`."""
        ...

    @property
    def norm(self) -> str:
        """`linf`, `l2` or `spatial`."""
        ...

    @property
    def eps(self) -> float:
        """Pixels in [0, 1]."""
        ...

    def __call__(self, logits_of: LogitsFn, items: Items) -> AttackResult: ...


@dataclass(frozen=True, kw_only=True)
class BudgetedAttack(AttackSettings):
    """Adds a norm and a budget to the settings of an attack.

    Bases are listed in this order: `class Pgd(BudgetedAttack, PgdSettings)`. It has no slots,
    because two slotted bases cannot be combined.
    """

    norm: Norm
    eps: NonNegative
    """Pixels in [0, 1]."""

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if not math.isfinite(self.eps):
            yield Problem("eps", self.eps, "is not a budget; write a number of pixels >= 0")
        elif self.norm == "linf" and self.eps > 1:
            hint = f"is above 1, the whole pixel range; did you mean {self.eps:g}/255?"
            yield Problem("eps", self.eps, hint)


class Search:
    """Results of one attack on a batch so far, starting with the clean forward pass."""

    def __init__(
        self, logits_of: LogitsFn, items: Items, *, clean_logits: Logits | None = None
    ) -> None:
        """`clean_logits` are known from an earlier pass, which this search then does not count."""
        self.items = items
        self.num_evaluations = torch.zeros_like(items.y)
        logits = clean_logits
        if logits is None:
            with torch.no_grad():
                logits = check_logits(logits_of(items.x), items.item_ids)
            self.num_evaluations += 1
        self.clean_prediction = logits.argmax(dim=1)  # first maximum = lowest class
        self.clean_logits = logits
        self.x_adv = items.x.clone()
        self.prediction = self.clean_prediction.clone()
        self.scores = torch.full_like(logits[:, 0], -math.inf)  # of the best point so far
        self.clean_margins = margin(logits, items.y)
        self.margins = self.clean_margins.clone()  # of the best point so far
        self.num_gradients = torch.zeros_like(items.y)
        self.num_zero_gradients = torch.zeros_like(items.y)

    @property
    def robust_rows(self) -> Tensor:
        """Ascending int64 rows whose visited points were all classified correctly, the clean one
        included: only these are attacked further.
        """
        return (self.prediction == self.items.y).nonzero().squeeze(1)

    def active(self) -> "ActiveRows":
        """The robust rows, for a loop."""
        return ActiveRows(self, self.robust_rows)

    def visit_clean(self, scores: Tensor) -> None:
        """Make the clean images candidates for the best point, with these scores (B,).

        The first misclassified point stays. A search that starts elsewhere calls this at its end.
        """
        better = (self.prediction == self.items.y) & (scores > self.scores)
        self.x_adv[better] = self.items.x[better]
        self.scores = scores.where(better, self.scores)
        self.margins = self.clean_margins.where(better, self.margins)

    def visit(self, rows: Tensor, x_adv: Images, logits: Logits, scores: Tensor) -> Tensor:
        """Record a forward pass of `rows`; returns which of them are still robust, as a bool mask.

        The first misclassified point is kept, until then the point of highest score.
        """
        prediction = logits.argmax(dim=1)
        broken = prediction != self.items.y[rows]
        better = broken | (scores > self.scores[rows])
        improved = rows[better]
        self.x_adv[improved] = x_adv[better]
        self.scores[improved] = scores[better]
        self.margins[improved] = margin(logits[better], self.items.y[improved])
        self.prediction[rows] = prediction
        self.num_evaluations[rows] += 1
        return ~broken

    def count_gradients(self, rows: Tensor, zero: Tensor) -> None:
        """Count one gradient of each of `rows`; `zero` (bool) marks those that are all zero."""
        self.num_gradients[rows] += 1
        self.num_zero_gradients[rows] += zero

    def result(self) -> AttackResult:
        return AttackResult(
            x_adv=self.x_adv,
            clean_prediction=self.clean_prediction,
            adversarial_prediction=self.prediction,
            margins=self.margins,
            **{name: getattr(self, name) for name in COUNTS},
        )


class ActiveRows:
    """The rows that one loop of an attack computes, packed, with the best point of each so far.

    `visit` and `count_gradients` do not wait for the device. `leave` does: it raises the faults
    noted, logits and gradients that are not finite, and takes the broken rows out. Where it is
    not due at each step, broken rows are computed along; their points and counts do not change.
    """

    PACKED = ("rows", "y", "robust", *POINTS, *COUNTS)

    def __init__(self, search: Search, rows: Tensor) -> None:
        self.search, self.rows = search, rows
        self.y, self.x_adv = search.items.y[rows], search.x_adv[rows]
        self.scores, self.margins = search.scores[rows], search.margins[rows]
        self.prediction = search.prediction[rows]
        self.robust = torch.ones_like(rows, dtype=torch.bool)
        self.num_evaluations = torch.zeros_like(rows)
        self.num_gradients = torch.zeros_like(rows)
        self.num_zero_gradients = torch.zeros_like(rows)
        self._finite_logits = self.robust.clone()
        self._finite_gradients = self.robust.clone()

    def __len__(self) -> int:
        return len(self.rows)

    def visit(
        self,
        x_adv: Images,
        logits: Logits,
        scores: Tensor,
        *,
        allowed: Tensor | None = None,
        num_evaluations: Tensor | int = 1,
    ) -> None:
        """Record a forward pass of all rows, as `Search.visit` does.

        `allowed` (bool) marks the points that may be kept; `num_evaluations` is what the pass cost.
        """
        prediction = logits.argmax(dim=1)
        candidates = self.robust if allowed is None else self.robust & allowed
        broken = candidates & (prediction != self.y)
        better = broken | (candidates & (scores > self.scores))
        put_rows(self.x_adv, better, x_adv)
        self.scores = scores.where(better, self.scores)
        self.margins = margin(logits, self.y).where(better, self.margins)
        self.prediction = prediction.where(broken, self.prediction)
        self.num_evaluations += num_evaluations * self.robust
        self.note_finite(logits.isfinite().all(dim=1))
        self.robust = self.robust & ~broken

    def note_finite(self, finite: Tensor) -> None:
        """(B,) bool: whether the logits of a pass were finite."""
        self._finite_logits &= finite | ~self.robust

    def count_gradients(self, gradient: Images) -> None:
        """Count one gradient of each row, before the visit of its point."""
        largest = gradient.abs().flatten(1).amax(dim=1)
        self.num_gradients += self.robust
        self.num_zero_gradients += self.robust & (largest == 0)
        self._finite_gradients &= largest.isfinite() | ~self.robust

    def is_due(self, step: int) -> bool:
        """Whether to call `leave` after this step: on a CPU always, for it saves work there."""
        return self.rows.device.type == "cpu" or (step + 1) % STEPS_BETWEEN_LOOKS == 0

    def leave(self, done: Tensor | None = None) -> Tensor | None:
        """Take the broken rows out, and those that are `done` (bool).

        Returns the int64 places of the rows that stay, ascending; None if all do.
        """
        staying = self.robust if done is None else self.robust & ~done
        if bool((staying & self._finite_logits & self._finite_gradients).all()):
            return None
        self._check_finite()
        kept = staying.nonzero().squeeze(1)
        self._write((~staying).nonzero().squeeze(1))
        for name in (*self.PACKED, "_finite_logits", "_finite_gradients"):
            setattr(self, name, getattr(self, name)[kept])
        return kept

    def finish(self) -> None:
        """Take all rows out."""
        self._check_finite()
        self._write(torch.arange(len(self.rows), device=self.rows.device))

    def _write(self, places: Tensor) -> None:
        search, rows = self.search, self.rows[places]
        for name in POINTS:
            getattr(search, name)[rows] = getattr(self, name)[places]
        for name in COUNTS:
            getattr(search, name)[rows] += getattr(self, name)[places]

    def _check_finite(self) -> None:
        for finite, logits in ((self._finite_logits, True), (self._finite_gradients, False)):
            if bool(finite.all()):
                continue
            name = f"item {self.search.items.item_ids[int(self.rows[finite.int().argmin()])]!r}"
            if logits:
                raise CasemateError("model", name, NOT_FINITE)
            raise FloatingPointError(f"the model's input gradient at {name} {UNUSABLE}")
