"""Attacks on finished models: one threat, a list of attacks in it, and sanity checks of both."""

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from components.attacks.base_settings import AttackSettings, UserAttackSettings
from components.attacks.settings import ATTACKS
from components.core.settings import EAGER, FLOAT32, Budget, Count, Fractional, Precision, Problem
from pipelines.recipe.schema.base import Section, union_of

if TYPE_CHECKING:
    AttackEntry = AttackSettings
else:
    AttackEntry = union_of(ATTACKS, users_own=UserAttackSettings)


class CurvesSection(Section):
    """Accuracy under PGD as the budget or the number of steps grows; empty lists draw nothing."""

    eps: list[Budget] = []
    """Budgets of the curve."""
    steps: list[Count] = []
    """Numbers of steps at the budget of the section."""
    num_items: Count = 100
    """Items of the curves, at most."""

    def problems(self) -> Iterator[Problem]:
        for key, values in (("eps", self.eps), ("steps", self.steps)):
            if any(a >= b for a, b in pairwise(values)):
                yield Problem(key, values, "must rise")


class SanitySection(Section):
    """Checks of our own attacks, on a few items."""

    num_items: Count = 64
    """Items that the checks use, at most."""


class AttackSection(Section):
    """A list of attacks under one threat: each gets the items that are robust to all before it."""

    models: list[str] = Field(default=["main"], min_length=1)
    """Models of the recipe that are attacked."""
    norm: Literal["linf", "l2", "spatial"] = "linf"
    """Norm of the budget."""
    eps: Budget | None = Field(default=None, validate_default=True)
    """Budget; required unless norm is spatial."""
    attacks: list[AttackEntry] = Field(min_length=1)
    """In this order: each attack gets the items that are correct under all earlier ones."""
    num_items: Count | None = None
    """Number of test items, from the first; None: all."""
    micro_batch: Count | Literal["auto"] = 35
    """Rows of every forward pass: logits depend on the batch shape. `auto`: measured by the first
    worker."""
    precision: Precision = Field(default="float32", exclude_if=lambda name: name == FLOAT32)
    """Precision in which models are attacked. `auto`: tf32 on GPUs that have it, else float32.
    Accuracies hold for the model in this precision and name it; sanity checks are in float32."""
    compiled: bool = Field(default=EAGER, exclude_if=lambda on: not on)
    """Compile networks with torch.compile; a failure is reported."""
    curves: CurvesSection | None = None
    """Accuracy over budgets and over steps, with PGD."""
    sanity: SanitySection | None = SanitySection()
    """Checks that doubt the attacks; null: off."""
    surrogate: str | None = None
    """A model whose adversarial images are transferred to the others."""

    @field_validator("eps", mode="before")
    @classmethod
    def _eps_fits_the_norm(cls, value: Any, info: ValidationInfo) -> Any:
        norm = info.data.get("norm")
        if norm == "spatial":
            if value is not None:
                raise ValueError("is ignored by norm: spatial; remove it")
            return None
        if value is None:
            raise ValueError("is missing; write it, e.g. 8/255")
        if norm == "linf" and not 0 <= Fractional.read(value) <= 1:
            remedy = "is outside [0, 1]; pixels are fractions of full scale, write e.g. 8/255"
            raise ValueError(remedy)
        return value

    @field_validator("models")
    @classmethod
    def _each_model_once(cls, models: list[str]) -> list[str]:
        if len(set(models)) < len(models):
            raise ValueError("names a model twice")
        return models

    def problems(self) -> Iterator[Problem]:
        spatial = self.norm == "spatial"
        for number, entry in enumerate(self.attacks):
            if self.norm not in entry.norms:
                remedy = f"is not an attack of norm {self.norm}; give it its own entry"
                yield Problem(f"attacks.{number}.kind", entry.kind, remedy)
        for key in ("curves", "sanity"):
            if spatial and getattr(self, key) is not None:
                yield Problem(key, "", "needs a norm; write null")
        if self.compiled and any(entry.scaling for entry in self.attacks):
            remedy = "cannot be combined with aas, which replaces parts of the network"
            yield Problem("compiled", "true", remedy)
        if self.surrogate and self.sanity is None:
            yield Problem("surrogate", self.surrogate, "is used by sanity, which is off")
        if self.norm == "linf" and self.curves and max(self.curves.eps, default=0) > 1:
            largest = max(self.curves.eps)
            yield Problem("curves.eps", f"{largest:g}", "is outside [0, 1]; write e.g. 8/255")
