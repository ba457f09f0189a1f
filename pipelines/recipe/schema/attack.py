"""Attacks on finished models: one threat, a list of attacks in it, and doubts about their answer.

Defaults are the published settings of each attack; `components/attacks/` says from which paper.
"""

from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from pipelines.recipe.schema.base import Count, Section, as_number, as_pixels

Budget = Annotated[float, Field(gt=0)]  # l-inf: at most 1; an l2 norm may be larger


class Gradient(Section):
    """What attacks with a step size share; `1/255` is a number, too."""

    @field_validator("step_size", mode="before", check_fields=False)
    @classmethod
    def _step_size_is_a_number(cls, value: object) -> object:
        return None if value is None else as_number(value)


class FgsmAttack(Gradient):
    """One or few large sign steps."""

    kind: Literal["fgsm"]
    num_steps: Count = 1
    step_size: Budget | None = None  # None: 1.5 eps / num_steps
    random_start: bool = True


class PgdAttack(Gradient):
    """Projected gradient ascent that keeps every misclassified point."""

    kind: Literal["pgd"]
    loss: Literal["ce", "margin", "dlr", "kl"] = "ce"
    num_steps: Count = 20
    step_size: Budget | None = None  # None: eps / 4
    num_restarts: Count = 1
    random_start: bool = True
    kappa: float | None = None  # clips loss: margin


class MimAttack(Gradient):
    """Steps along an accumulated gradient."""

    kind: Literal["mim"]
    num_steps: Count = 10
    step_size: Budget | None = None  # None: eps / num_steps
    decay: float = Field(default=1.0, ge=0)
    random_start: bool = False


class GamaAttack(Section):
    """Margin of probabilities, guided away from a reference prediction first."""

    kind: Literal["gama"]
    num_steps: Count = 100
    num_restarts: Count = 1
    reference: Literal["start", "clean"] = "start"


class ApgdAttack(Section):
    """Steps that halve themselves; AutoAttack starts once, papers' APGD-CE often five times."""

    kind: Literal["apgd-ce", "apgd-dlr"]
    num_steps: Count = 100
    num_restarts: Count = 1
    rho: float = Field(default=0.75, ge=0, le=1)
    eot_iter: Count = 1  # gradients that are summed at each point of a random model


class ApgdTargetedAttack(Section):
    """APGD towards one wrong class after the other."""

    kind: Literal["apgd-t"]
    num_targets: Count = 9
    num_steps: Count = 100


class FabAttack(Section):
    """The nearest misclassified point."""

    kind: Literal["fab"]
    num_steps: Count = 100
    num_restarts: Count = 1
    alpha_max: float = Field(default=0.1, ge=0, le=1)
    eta: float = Field(default=1.05, gt=0)
    beta: float = Field(default=0.9, ge=0, le=1)


class FabTargetedAttack(FabAttack):
    """The nearest point of one wrong class after the other."""

    kind: Literal["fab-t"]  # type: ignore[assignment]
    num_targets: Count = 9


class SquareAttack(Section):
    """Random squares, without a gradient."""

    kind: Literal["square"]
    num_queries: Count = 5000
    p_init: float = Field(default=0.8, gt=0, le=1)


class SpatialAttack(Section):
    """The worst rotation and shift of a grid; goes with `norm: spatial`."""

    kind: Literal["spatial"]
    max_shift: float = Field(default=3.0, ge=0)  # pixels
    num_shifts: Count = 5
    max_angle: float = Field(default=30.0, ge=0)  # degrees
    num_angles: Count = 31


class AutoAttack(Section):
    """The published ensemble; other numbers of steps or queries make it a weaker one."""

    kind: Literal["autoattack"]
    version: Literal["standard", "plus", "rand"] = "standard"
    num_steps: Count | None = None  # None: 100
    num_queries: Count | None = None  # None: 5000


Inner = Annotated[
    FgsmAttack
    | PgdAttack
    | MimAttack
    | GamaAttack
    | ApgdAttack
    | ApgdTargetedAttack
    | FabAttack
    | FabTargetedAttack,
    Field(discriminator="kind"),
]


class ScaleSearchSection(Section):
    """Factors on attention logits by ascent (Jain & Dutta, Algorithm 1)."""

    objective: Literal["lpips", "ce", "margin", "gama"] = "lpips"
    distance: Literal["unit", "eq3_squared", "eq3_literal"] = "unit"
    num_draws: Count = 3  # one candidate each
    num_steps: Count = 10
    step_size: float = Field(default=1.0, gt=0)
    noise: float = Field(default=1.0, gt=0)
    num_items: Count = 64  # the first test items: the factors are fixed for the whole run
    batch_size: Count = 64


class AasAttack(Section):
    """Adaptive attention scaling around any gradient attack; always replayed on the model itself.

    `scales` are further candidates, each the same factor in every attention module.
    """

    kind: Literal["aas"]
    inner: Inner
    search: ScaleSearchSection | None = ScaleSearchSection()
    scales: list[Budget] = [0.1, 0.01, 0.001]  # searched ones alone often leave nothing to attack
    surrogate: Literal["network", "gradient"] = "network"

    @model_validator(mode="after")
    def _has_candidates(self) -> Self:
        if self.search is None and not self.scales:
            raise PydanticCustomError("scales", "scales: is empty and there is no search; set one")
        return self


AttackEntry = Annotated[
    FgsmAttack
    | PgdAttack
    | MimAttack
    | GamaAttack
    | ApgdAttack
    | ApgdTargetedAttack
    | FabAttack
    | FabTargetedAttack
    | SquareAttack
    | SpatialAttack
    | AutoAttack
    | AasAttack,
    Field(discriminator="kind"),
]


class CurvesSection(Section):
    """Accuracy under PGD as the budget or the number of steps grows; empty lists draw nothing."""

    eps: list[Budget] = []
    steps: list[Count] = []
    num_items: Count = 100

    @field_validator("eps", mode="before")
    @classmethod
    def _eps_are_numbers(cls, values: object) -> object:
        return [as_number(value) for value in values] if isinstance(values, list) else values

    @model_validator(mode="after")
    def _in_rising_order(self) -> Self:
        for key, values in (("eps", self.eps), ("steps", self.steps)):
            if any(a >= b for a, b in pairwise(values)):
                raise PydanticCustomError(
                    "curves", "{key}: {values} must rise", {"key": key, "values": str(values)}
                )
        return self


class SanitySection(Section):
    """Checks that doubt our own attacks, on a few items."""

    num_items: Count = 64


class AttackSection(Section):
    """A list of attacks under one threat: each gets the items that all before it left standing."""

    models: list[str] = Field(default=["main"], min_length=1)
    norm: Literal["linf", "l2", "spatial"] = "linf"
    eps: Budget | None = Field(default=None, validate_default=True)
    attacks: list[AttackEntry] = Field(min_length=1)
    num_items: Count | None = None  # None: the whole test split
    micro_batch: Count = 35  # rows of every forward pass: logits depend on the batch shape
    curves: CurvesSection | None = None
    sanity: SanitySection | None = SanitySection()
    surrogate: str | None = None  # a model; its adversarial images are tried on the others

    @field_validator("eps", mode="before")
    @classmethod
    def _eps_fits_the_norm(cls, value: Any, info: ValidationInfo) -> Any:
        norm = info.data.get("norm")
        if norm == "spatial":
            if value is not None:
                raise PydanticCustomError("eps", "is ignored by norm: spatial; remove it")
            return None
        if value is None:
            raise PydanticCustomError("missing", "is missing")
        return as_number(value) if norm == "l2" else as_pixels(value)

    @field_validator("models")
    @classmethod
    def _each_model_once(cls, models: list[str]) -> list[str]:
        if len(set(models)) < len(models):
            raise PydanticCustomError("models", "names a model twice")
        return models

    @model_validator(mode="after")
    def _one_threat(self) -> Self:
        spatial = self.norm == "spatial"
        for entry in self.attacks:
            if (entry.kind == "spatial") != spatial:
                raise PydanticCustomError(
                    "threat",
                    "attacks: {kind} is no attack of norm {norm}; give it an entry of its own",
                    {"kind": entry.kind, "norm": self.norm},
                )
        ignored = [k for k in ("curves", "sanity") if getattr(self, k) is not None]
        if spatial and ignored:
            raise PydanticCustomError(
                "threat", "{key}: needs a norm; write null", {"key": ignored[0]}
            )
        if self.surrogate and self.sanity is None:
            raise PydanticCustomError("threat", "surrogate: is used by sanity, which is off")
        if self.norm == "linf" and self.curves and max(self.curves.eps, default=0) > 1:
            raise PydanticCustomError("threat", "curves.eps: is outside [0, 1]; write e.g. 8/255")
        return self
