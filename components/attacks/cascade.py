"""A list of attacks on the same rows: each gets the rows that are robust to all before it.

The order of Croce & Hein 2020, "Reliable evaluation of adversarial robustness", sec. 5: a row is
robust if it is classified correctly at the clean point and at every point that any attack found.
Results do not depend on batches, so a list may be cut anywhere: run the first attacks, save the
`CascadeState`, run the others later or elsewhere, and the result is the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from components.attacks.interface import Attack, AttackResult, Items
from components.attacks.losses import margin
from components.core.errors import CasemateError
from components.core.types import Images, Labels, Logits, LogitsFn
from components.models.logits import check_logits

UNBROKEN = -1


@dataclass(frozen=True, slots=True)
class Outcome:
    """An `AttackResult` without its images, (B,) int64 each."""

    clean_prediction: Labels
    adversarial_prediction: Labels
    num_evaluations: Tensor
    num_gradients: Tensor
    num_zero_gradients: Tensor

    @classmethod
    def of(cls, result: AttackResult) -> "Outcome":
        return cls(**{field.name: getattr(result, field.name) for field in fields(cls)})


class AttackTally(NamedTuple):
    """Number of rows that one attack of the list received, and that it broke."""

    name: str
    num_rows: int
    num_broken: int


@dataclass(frozen=True, slots=True)
class CascadeState:
    """Results of a list of attacks so far, (B,) int64 per row; counts are sums over the list."""

    y: Labels
    clean_prediction: Labels
    adversarial_prediction: Labels  # wrong class that was found; the label while the row is robust
    broken_by: Tensor  # position in `tallies`; UNBROKEN if robust or misclassified when clean
    num_evaluations: Tensor
    num_gradients: Tensor
    num_zero_gradients: Tensor
    tallies: tuple[AttackTally, ...] = ()

    @property
    def robust(self) -> Tensor:
        """(B,) bool: correct at the clean point and under every attack so far."""
        return self.adversarial_prediction == self.y

    @property
    def robust_rows(self) -> Tensor:
        """int64 rows for the next attack, ascending."""
        return self.robust.nonzero().squeeze(1)

    def breaker_names(self) -> list[str | None]:
        """For each row the name of the attack that broke it."""
        names = [tally.name for tally in self.tallies]
        return [None if at == UNBROKEN else names[at] for at in self.broken_by.tolist()]


@dataclass(frozen=True, slots=True)
class CascadeResult:
    """The state and the best points, as `interface.py` defines them; attacks do not start there."""

    state: CascadeState
    x_adv: Images
    margins: Tensor  # (B,) of logits at `x_adv`

    def copy(self) -> "CascadeResult":
        """The same result, for `take`."""
        return CascadeResult(self.state, self.x_adv.clone(), self.margins.clone())

    def take(self, rows: Tensor, result: AttackResult) -> None:
        """Take over, in place, what one more attack found on these robust rows, if it is better."""
        broken = result.adversarial_prediction != self.state.y[rows]
        better = broken | (result.known_margins > self.margins[rows])
        self.x_adv[rows[better]] = result.x_adv[better]
        self.margins[rows[better]] = result.known_margins[better]


def before_attacks(y: Labels, clean_prediction: Labels) -> CascadeState:
    """The state after the clean forward pass: misclassified rows are not attacked."""
    none = torch.zeros_like(y)
    return CascadeState(
        y=y,
        clean_prediction=clean_prediction,
        adversarial_prediction=clean_prediction,
        broken_by=torch.full_like(y, UNBROKEN),
        num_evaluations=torch.ones_like(y),
        num_gradients=none,
        num_zero_gradients=none,
    )


def after_attack(state: CascadeState, name: str, outcome: Outcome) -> CascadeState:
    """The state after one more attack, whose `outcome` has one row for each robust row.

    A row whose clean point is misclassified during the attack (possible for a random model) counts
    as broken: that point lies in the ball too.
    """
    rows = state.robust_rows
    if len(outcome.adversarial_prediction) != len(rows):
        count = len(outcome.adversarial_prediction)
        raise ValueError(f"{name} reports {count} rows, but {len(rows)} were robust")
    broken = outcome.adversarial_prediction != state.y[rows]
    tally = AttackTally(name, num_rows=len(rows), num_broken=int(broken.sum()))
    here = torch.full_like(rows, len(state.tallies)).where(broken, UNBROKEN)
    return replace(
        state,
        adversarial_prediction=state.adversarial_prediction.index_copy(
            0, rows, outcome.adversarial_prediction
        ),
        broken_by=state.broken_by.index_copy(0, rows, here),
        **{
            count: getattr(state, count).index_add(0, rows, getattr(outcome, count))
            for count in ("num_evaluations", "num_gradients", "num_zero_gradients")
        },
        tallies=(*state.tallies, tally),
    )


def run_cascade(
    attacks: Sequence[Attack],
    logits_of: LogitsFn,
    items: Items,
    *,
    done: CascadeResult | None = None,
) -> CascadeResult:
    """Every attack on the rows that are robust to all earlier ones.

    `done` is the result of the first attacks of the same list on the same rows: they are not run
    again. Hold `attack_mode(model)` around the call.
    """
    check_one_threat(attacks)
    if done is None:
        with torch.no_grad():
            logits = check_logits(logits_of(items.x), items.item_ids)
        done = clean_result(items, logits)
    _check_first_attacks(attacks, done.state, items)
    done = done.copy()
    for attack in attacks[len(done.state.tallies) :]:
        rows = done.state.robust_rows
        outcome = Outcome(*[rows] * 5)
        if len(rows) > 0:  # networks reject empty batches
            result = attack(logits_of, items.take(rows))
            done.take(rows, result)
            outcome = Outcome.of(result)
        done = replace(done, state=after_attack(done.state, attack.name, outcome))
    return done


def clean_result(items: Items, logits: Logits) -> CascadeResult:
    """The result after the clean forward pass: every image is its own best point."""
    state = before_attacks(items.y, logits.argmax(dim=1))
    return CascadeResult(state, items.x, margin(logits, items.y))


def check_one_threat(attacks: Sequence[Attack]) -> None:
    """Reject a list of attacks with different threat models: its accuracy would belong to none."""
    threats = sorted({f"{attack.norm} {attack.eps:g}" for attack in attacks})
    if len(threats) > 1:
        raise CasemateError(
            "attacks", ", ".join(threats), "are different threats; give each its own list"
        )


def _check_first_attacks(attacks: Sequence[Attack], state: CascadeState, items: Items) -> None:
    planned = [attack.name for attack in attacks]
    finished = [tally.name for tally in state.tallies]
    if planned[: len(finished)] != finished:
        raise ValueError(f"{finished} are not the first attacks of {planned}")
    if not torch.equal(state.y, items.y):
        raise ValueError("the labels differ from those of the finished attacks")
