"""What every attack takes and gives: rows with their own randomness, and an honest account.

An attack is a frozen dataclass of plain settings, called with a model and the rows under attack.
`Search` keeps the books for those that visit points: who still stands, at what cost, and the best
point of each row. Robust accuracy counts rows that are right before and after, over all rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from components.attacks.gradients import check_logits
from components.core.errors import CasemateError
from components.core.seeding import generator_for
from components.core.types import Images, Labels, Logits, LogitsFn

NORMS = ("linf", "l2")


@dataclass(frozen=True, slots=True)
class Items:
    """Rows under attack; all randomness of a row is a function of (run_seed, stream, its item id).

    So a row meets the same numbers whatever shares its batch. Soft targets (mixup, cutmix) become
    the class with the largest share.
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
    """(B,) class numbers; of soft targets (B, K) the largest share, ties to the lowest class."""
    return targets.argmax(dim=1) if targets.dim() == 2 else targets


@dataclass(frozen=True, slots=True)
class AttackResult:
    """What one attack did to each row.

    `x_adv` is a misclassified point if one was found, else the attack's best point, never outside
    the budget; rows that were wrong from the beginning come back unchanged.
    """

    x_adv: Images
    clean_prediction: Labels
    adversarial_prediction: Labels  # the model's prediction at `x_adv`
    num_evaluations: Tensor  # (B,) int64 forward passes, the clean one included
    num_gradients: Tensor  # (B,) int64 gradient evaluations
    num_zero_gradients: Tensor  # (B,) int64 of those, how many vanished everywhere

    @property
    def zero_gradient(self) -> Tensor:
        """(B,) bool: rows on which the attack was blind at least once; survival proves less."""
        return self.num_zero_gradients > 0


class Attack(Protocol):
    """Settings that can be called. Hold `attack_mode(model)` around the call."""

    @property
    def name(self) -> str:
        """Short, and different for each family of settings: `pgd-20-ce`, `apgd-t`, `square`."""
        ...

    @property
    def norm(self) -> str:
        """`linf` or `l2`."""
        ...

    @property
    def eps(self) -> float:
        """Pixels in [0, 1]."""
        ...

    def __call__(self, logits_of: LogitsFn, items: Items) -> AttackResult: ...


class Search:
    """The books of one attack on a batch, opened by the clean forward pass.

    `standing` holds the rows not yet misclassified, in rising order: work on those only.
    """

    def __init__(self, logits_of: LogitsFn, items: Items) -> None:
        with torch.no_grad():
            logits = check_logits(logits_of(items.x), items.item_ids)
        self.items = items
        self.clean_prediction = logits.argmax(dim=1)  # first maximum = lowest class
        self.clean_logits = logits
        self.x_adv = items.x.clone()
        self.prediction = self.clean_prediction.clone()
        self.scores = torch.full_like(logits[:, 0], -math.inf)  # of the best point so far
        self.num_evaluations = torch.ones_like(items.y)
        self.num_gradients = torch.zeros_like(items.y)
        self.num_zero_gradients = torch.zeros_like(items.y)

    @property
    def standing(self) -> Tensor:
        """int64 rows whose every visited point was classified rightly, the clean one included."""
        return (self.prediction == self.items.y).nonzero().squeeze(1)

    def visit(self, rows: Tensor, x_adv: Images, logits: Logits, scores: Tensor) -> Tensor:
        """Count a forward pass of `rows`; returns which of them still stand, as a bool mask.

        Kept is the first misclassified point, until then the one of highest score.
        """
        prediction = logits.argmax(dim=1)
        broken = prediction != self.items.y[rows]
        better = broken | (scores > self.scores[rows])
        improved = rows[better]
        self.x_adv[improved] = x_adv[better]
        self.scores[improved] = scores[better]
        self.prediction[rows] = prediction
        self.num_evaluations[rows] += 1
        return ~broken

    def count_gradients(self, rows: Tensor, zero: Tensor) -> None:
        """One gradient of each of `rows`; `zero` (bool) marks those that vanished everywhere."""
        self.num_gradients[rows] += 1
        self.num_zero_gradients[rows] += zero

    def result(self) -> AttackResult:
        return AttackResult(
            x_adv=self.x_adv,
            clean_prediction=self.clean_prediction,
            adversarial_prediction=self.prediction,
            num_evaluations=self.num_evaluations,
            num_gradients=self.num_gradients,
            num_zero_gradients=self.num_zero_gradients,
        )


def check_budget(name: str, *, norm: str, eps: float) -> None:
    """Refuse what cannot be a budget; `name` is the attack's kind."""
    if norm not in NORMS:
        raise CasemateError(f"{name}.norm", norm, f"is unknown; choose {' or '.join(NORMS)}")
    if not (math.isfinite(eps) and eps >= 0):
        raise CasemateError(f"{name}.eps", eps, "is no budget; write a number of pixels >= 0")
    if norm == "linf" and eps > 1:
        hint = f"is above 1, the whole pixel range; did you mean {eps:g}/255?"
        raise CasemateError(f"{name}.eps", eps, hint)


def check_counts(name: str, **counts: int) -> None:
    """Every count is at least one: an attack of no steps breaks nothing and looks like proof."""
    for key, count in counts.items():
        if count < 1:
            raise CasemateError(f"{name}.{key}", count, "must be at least 1")
