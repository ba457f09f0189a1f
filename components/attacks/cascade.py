"""A list of attacks on the same rows: cheap ones first, only survivors go on, the union counts.

The order of Croce & Hein 2020, "Reliable evaluation of adversarial robustness", sec. 5: a row is
robust if it is right at the clean point and at every point that any attack found. Which rows share
a batch changes nothing, so a list may be cut anywhere: run the first attacks, save `Standing`, run
the others later or elsewhere, and the result is the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from components.attacks.gradients import check_logits
from components.attacks.interface import Attack, AttackResult, Items
from components.core.errors import CasemateError
from components.core.types import Images, Labels, LogitsFn

UNBROKEN = -1


@dataclass(frozen=True, slots=True)
class Outcome:
    """An `AttackResult` without its images: what is kept of each row, (B,) int64 each."""

    clean_prediction: Labels
    adversarial_prediction: Labels
    num_evaluations: Tensor
    num_gradients: Tensor
    num_zero_gradients: Tensor

    @classmethod
    def of(cls, result: AttackResult) -> "Outcome":
        return cls(**{field.name: getattr(result, field.name) for field in fields(cls)})


@dataclass(frozen=True, slots=True)
class AttackTally:
    """How one attack of the list did: rows it was given, rows it broke."""

    name: str
    num_rows: int
    num_broken: int


@dataclass(frozen=True, slots=True)
class Standing:
    """Per row (B,) int64, what a list of attacks has done so far; counts are sums over the list."""

    y: Labels
    clean_prediction: Labels
    adversarial_prediction: Labels  # where the row broke, else the label; the clean one if wrong
    broken_by: Tensor  # position in `tallies`, or UNBROKEN; rows wrong from the start are unbroken
    num_evaluations: Tensor
    num_gradients: Tensor
    num_zero_gradients: Tensor
    tallies: tuple[AttackTally, ...] = ()

    @property
    def correct(self) -> Tensor:
        """(B,) bool: right at the clean point and under every attack so far."""
        return self.adversarial_prediction == self.y

    @property
    def survivors(self) -> Tensor:
        """int64 rows that the next attack is given, in rising order."""
        return self.correct.nonzero().squeeze(1)

    def breaker_names(self) -> list[str | None]:
        """Per row the attack that broke it."""
        names = [tally.name for tally in self.tallies]
        return [None if at == UNBROKEN else names[at] for at in self.broken_by.tolist()]


@dataclass(frozen=True, slots=True)
class CascadeResult:
    """Who stands, and for each broken row the point that broke it; other rows are as they came."""

    standing: Standing
    x_adv: Images


def before_attacks(y: Labels, clean_prediction: Labels) -> Standing:
    """The state that one forward pass at the clean point leaves: wrong rows are out already."""
    none = torch.zeros_like(y)
    return Standing(
        y=y,
        clean_prediction=clean_prediction,
        adversarial_prediction=clean_prediction,
        broken_by=torch.full_like(y, UNBROKEN),
        num_evaluations=torch.ones_like(y),
        num_gradients=none,
        num_zero_gradients=none,
    )


def after_attack(standing: Standing, name: str, outcome: Outcome) -> Standing:
    """The state after one more attack, whose `outcome` has one row for each of the survivors.

    A survivor whose clean point the attack itself saw misclassified (a random model can do that)
    counts as broken: that point lies in the ball too.
    """
    rows = standing.survivors
    if len(outcome.adversarial_prediction) != len(rows):
        count = len(outcome.adversarial_prediction)
        raise ValueError(f"{name} reports {count} rows, but {len(rows)} were standing")
    broken = outcome.adversarial_prediction != standing.y[rows]
    tally = AttackTally(name, num_rows=len(rows), num_broken=int(broken.sum()))
    here = torch.full_like(rows, len(standing.tallies)).where(broken, UNBROKEN)
    return replace(
        standing,
        adversarial_prediction=standing.adversarial_prediction.index_copy(
            0, rows, outcome.adversarial_prediction
        ),
        broken_by=standing.broken_by.index_copy(0, rows, here),
        **{
            count: getattr(standing, count).index_add(0, rows, getattr(outcome, count))
            for count in ("num_evaluations", "num_gradients", "num_zero_gradients")
        },
        tallies=(*standing.tallies, tally),
    )


def run_cascade(
    attacks: Sequence[Attack],
    logits_of: LogitsFn,
    items: Items,
    *,
    done: CascadeResult | None = None,
) -> CascadeResult:
    """Every attack on the rows that all earlier ones left standing.

    `done` is the result of a beginning of the same list on the same rows: those attacks are not run
    again. Hold `attack_mode(model)` around the call.
    """
    check_one_threat(attacks)
    if done is None:
        with torch.no_grad():
            logits = check_logits(logits_of(items.x), items.item_ids)
        done = CascadeResult(before_attacks(items.y, logits.argmax(dim=1)), items.x)
    _check_beginning(attacks, done.standing, items)
    standing, x_adv = done.standing, done.x_adv.clone()
    for attack in attacks[len(standing.tallies) :]:
        rows = standing.survivors
        if len(rows) == 0:  # nobody to attack, and networks refuse empty batches
            standing = after_attack(standing, attack.name, Outcome(*[rows] * 5))
            continue
        result = attack(logits_of, items.take(rows))
        standing = after_attack(standing, attack.name, Outcome.of(result))
        broken = ~standing.correct[rows]
        x_adv[rows[broken]] = result.x_adv[broken]
    return CascadeResult(standing, x_adv)


def check_one_threat(attacks: Sequence[Attack]) -> None:
    """Refuse a list over several threat models: their union is no accuracy under any of them."""
    threats = sorted({f"{attack.norm} {attack.eps:g}" for attack in attacks})
    if len(threats) > 1:
        raise CasemateError(
            "attacks", ", ".join(threats), "are different threats; give each a list of its own"
        )


def _check_beginning(attacks: Sequence[Attack], standing: Standing, items: Items) -> None:
    planned = [attack.name for attack in attacks]
    finished = [tally.name for tally in standing.tallies]
    if planned[: len(finished)] != finished:
        raise ValueError(f"{finished} is no beginning of {planned}")
    if not torch.equal(standing.y, items.y):
        raise ValueError("the finished attacks saw rows with other labels")
