"""A user-defined attack, named `python:file.py:Name` (`components/core/user_code.py`).

`Name(settings, norm=..., eps=...)` returns an `Attack`. Only its points are believed, and only
inside the budget: points outside the ball would count items as broken that are robust inside it.
Predictions and margins are those of the model at the clean images and at these points; those of the
user's result are replaced. A point that is not better than the clean image gives way to it.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from components.attacks.interface import Attack, AttackResult, Items
from components.attacks.losses import margin
from components.core.errors import CasemateError
from components.core.types import Images, Logits, LogitsFn
from components.core.user_code import UserEntry
from components.models.logits import check_logits

NEEDED = ("name", "__call__")
COUNTS = ("num_evaluations", "num_gradients", "num_zero_gradients")
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
            raise self._refusal(remedy) from error
        if missing := [name for name in NEEDED if not hasattr(made, name)]:
            raise self._refusal(f"is not an attack: it lacks {', '.join(missing)}")
        return made

    @property
    def name(self) -> str:
        return str(self.inner.name)

    def __call__(self, logits_of: LogitsFn, items: Items) -> AttackResult:
        result = self._found(logits_of, items)
        self._check_form(result, items)
        x_adv = result.x_adv.detach()
        self._check_budget(x_adv, items)
        with torch.no_grad():
            clean, adversarial = (
                check_logits(logits_of(x), items.item_ids) for x in (items.x, x_adv)
            )
        return _checked(result, items, x_adv, clean=clean, adversarial=adversarial)

    def _found(self, logits_of: LogitsFn, items: Items) -> AttackResult:
        """What the user's code returns; it gets copies, so that it cannot change the items."""
        copies = Items(items.x.clone(), items.y.clone(), items.item_ids, items.run_seed)
        try:
            result = self.inner(logits_of, copies)
        except (CasemateError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise self._refusal(
                f"fails on items {items.item_ids[0]} to {items.item_ids[-1]}: "
                f"{type(error).__name__}: {' '.join(str(error).split())}"
            ) from error
        if not isinstance(result, AttackResult):
            raise self._refusal(f"returns a {type(result).__name__}, not an AttackResult")
        return result

    def _check_form(self, result: AttackResult, items: Items) -> None:
        """Reject results of other shapes, types or devices than those of the items."""
        for name, like in {"x_adv": items.x, **dict.fromkeys(COUNTS, items.y)}.items():
            found = getattr(result, name)
            if _form(found) != _form(like):
                raise self._refusal(f"returns {name} as {_form(found)}, not as {_form(like)}")
            if name in COUNTS and bool((found < 0).any()):
                raise self._refusal(f"returns {name} below 0")

    def _check_budget(self, x_adv: Images, items: Items) -> None:
        points = x_adv.flatten(1)
        change = points - items.x.flatten(1)
        sizes = change.abs().amax(dim=1) if self.norm == "linf" else change.norm(dim=1)
        inside = (sizes <= self.eps + ROUNDING) & ((points >= 0) & (points <= 1)).all(dim=1)
        outside = ~inside  # NaN is outside, too
        if outside.any():
            first = items.item_ids[int(outside.nonzero()[0, 0])]
            remedy = f"leaves the budget of {self.eps:g} or the range [0, 1] on item {first}"
            raise self._refusal(remedy)

    def _refusal(self, remedy: str) -> CasemateError:
        return CasemateError("attacks.kind", self.entry.kind, remedy)

    def __reduce__(self) -> tuple[Any, ...]:
        return UserAttack, (self.entry, self.norm, self.eps)


def user_attack(entry: UserEntry, *, norm: str, eps: float) -> UserAttack:
    """The attack of a user-defined entry; constructed once here to detect errors early."""
    attack = UserAttack(entry, norm, eps)
    _ = attack.inner
    return attack


def _checked(
    result: AttackResult, items: Items, x_adv: Images, *, clean: Logits, adversarial: Logits
) -> AttackResult:
    """`result` with the best points, by these logits at the images and at the points."""
    before, after = (margin(logits, items.y) for logits in (clean, adversarial))
    broken = adversarial.argmax(dim=1) != items.y
    better = (clean.argmax(dim=1) == items.y) & (broken | (after >= before))
    logits = adversarial.where(better[:, None], clean)
    return replace(
        result,
        x_adv=x_adv.where(better[:, None, None, None], items.x),
        clean_prediction=clean.argmax(dim=1),
        adversarial_prediction=logits.argmax(dim=1),
        margins=margin(logits, items.y),
    )


def _form(found: object) -> str:
    """Type, shape and device of a tensor; the type of anything else."""
    if not isinstance(found, Tensor):
        return type(found).__name__
    return f"{str(found.dtype).removeprefix('torch.')} {tuple(found.shape)} on {found.device}"
