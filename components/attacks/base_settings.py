"""Base classes of the settings of attacks."""

from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from components.core.pass_counts import CLEAN, PassCounts, ascent
from components.core.settings import Count, Problem, Settings, default_of
from components.core.user_code import UserEntry

if TYPE_CHECKING:
    from components.attacks.settings import AasSettings

Norm = Literal["linf", "l2"]


class AttackSettings(Settings):
    """Base of all attack settings: what recipes, the command line and the stage use of any attack.

    The defaults are those of a single attack with steps; ensembles and wrappers override them.
    """

    __slots__ = ()

    kind: str
    count_field: ClassVar[str | None] = "num_steps"
    """Field set by the number in `pgd-20`; None: the kind takes no number."""
    fewest_steps: ClassVar[int] = 0
    """Fewer steps than this overstate robustness."""
    norms: ClassVar[tuple[str, ...]] = get_args(Norm)
    """The norms of its budgets."""
    weak_alone: ClassVar[bool] = False
    """Whether an attack list of this kind alone overstates robustness."""

    @property
    def name(self) -> str:
        """Short, in results and metrics; settings of one kind may share it."""
        return self.kind

    @property
    def min_classes(self) -> int:
        """The fewest classes that the attack works with."""
        return 2

    @property
    def base_attack(self) -> "AttackSettings":
        """The attack itself, without attention scaling around it."""
        return self

    @property
    def scaling(self) -> "AasSettings | None":
        """Attention scaling around the attack, if any."""
        return None

    def members(self) -> "tuple[AttackSettings, ...]":
        """The attacks to run, in order: an ensemble has several."""
        return (self,)

    def pass_counts(self, num_classes: int) -> PassCounts | None:
        """Passes of an item that withstands the attack, the clean one included: the most.

        None: not known before.
        """
        return None

    def most_evaluations(self, num_classes: int) -> int:
        """The most forward passes of an item, the clean one included; 0: not known before."""
        counts = self.pass_counts(num_classes)
        return 0 if counts is None else round(counts.forward)

    @classmethod
    def has_short_form(cls) -> bool:
        """Whether the kind alone describes an attack: every setting has a default."""
        return all(default_of(cls, field.name) is not MISSING for field in fields(cls))  # type: ignore[arg-type]

    @classmethod
    def from_suffix(cls, text: str) -> dict[str, object] | None:
        """The settings that `text` in `kind-text` stands for; None if it is not valid."""
        return {cls.count_field: int(text)} if cls.count_field and text.isdigit() else None

    def weaknesses(self, eps: float | None) -> Iterator[Problem]:
        """Allowed settings that overstate robustness."""
        num_steps = getattr(self, "num_steps", None)
        if num_steps is not None and num_steps < self.fewest_steps:
            remedy = f"steps overstate robustness; use {self.fewest_steps} or more"
            yield Problem("num_steps", num_steps, remedy)


class GradientSettings(AttackSettings):
    """Base of the attacks that share the loop of `gradient.py`."""

    __slots__ = ()

    num_steps: Count
    num_restarts: int = 1  # of attacks without this setting
    random_start: bool = True  # of attacks without this setting

    def pass_counts(self, num_classes: int) -> PassCounts:
        return CLEAN + self.num_restarts * (ascent(self.num_steps) + CLEAN)

    def step_size_at(self, eps: float) -> float:
        """The step size of an attack with this budget."""
        raise NotImplementedError


class UserAttackSettings(UserEntry, AttackSettings):
    """A user-defined attack, `kind: python:file.py:Name`."""

    def pass_counts(self, num_classes: int) -> PassCounts | None:
        """As the user's settings say, if they do: `pass_counts(num_classes)`."""
        own = getattr(self.settings, "pass_counts", None)
        return None if own is None else own(num_classes)

    @property
    def name(self) -> str:
        """Name of the user's class: metric names do not allow all characters of a reference."""
        return self.kind.rpartition(":")[2]
