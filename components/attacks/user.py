"""A user-defined attack, named `python:file.py:Name` (`components/core/user_code.py`).

`Name(settings, norm=..., eps=...)` returns an `Attack`. Its points are checked against the
budget: points outside the ball would count items as broken that are robust inside it.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from components.attacks.interface import Attack, AttackResult, Items
from components.core.errors import CasemateError
from components.core.types import LogitsFn
from components.core.user_code import UserEntry

NEEDED = ("name", "__call__")
ROUNDING = 1e-5  # tolerance for rounding of float32 sums over an image


@dataclass(frozen=True)
class UserAttack:
    """The user's attack; pickled for workers as its entry and budget."""

    entry: UserEntry
    norm: str
    eps: float

    @cached_property
    def inner(self) -> Attack:
        """The attack that the user's class constructs from the settings."""
        try:
            made: Attack = self.entry.load()(self.entry.settings, norm=self.norm, eps=self.eps)
        except CasemateError:
            raise
        except Exception as error:
            remedy = f"fails to start: {type(error).__name__}: {' '.join(str(error).split())}"
            raise CasemateError("attacks.kind", self.entry.kind, remedy) from error
        if missing := [name for name in NEEDED if not hasattr(made, name)]:
            remedy = f"is not an attack: it lacks {', '.join(missing)}"
            raise CasemateError("attacks.kind", self.entry.kind, remedy)
        return made

    @property
    def name(self) -> str:
        return str(self.inner.name)

    def __call__(self, logits_of: LogitsFn, items: Items) -> AttackResult:
        result = self.inner(logits_of, items)
        if not isinstance(result, AttackResult):
            remedy = f"returns a {type(result).__name__}, not an AttackResult"
            raise CasemateError("attacks.kind", self.entry.kind, remedy)
        points = result.x_adv.flatten(1)
        change = points - items.x.flatten(1)
        sizes = change.abs().amax(dim=1) if self.norm == "linf" else change.norm(dim=1)
        inside = (sizes <= self.eps + ROUNDING) & ((points >= 0) & (points <= 1)).all(dim=1)
        outside = ~inside  # NaN is outside, too
        if outside.any():
            first = items.item_ids[int(outside.nonzero()[0, 0])]
            remedy = f"leaves the budget of {self.eps:g} or the range [0, 1] on item {first}"
            raise CasemateError("attacks.kind", self.entry.kind, remedy)
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        return UserAttack, (self.entry, self.norm, self.eps)


def user_attack(entry: UserEntry, *, norm: str, eps: float) -> UserAttack:
    """The attack of a user-defined entry; constructed once here to detect errors early."""
    attack = UserAttack(entry, norm, eps)
    _ = attack.inner
    return attack
