"""Tuning: search space, search algorithm, scheduler and metric."""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from components.attacks.settings import PgdSettings
from components.core.settings import Count, Fractional, Problem, default_of
from components.core.user_code import pinned_inside
from pipelines.recipe.schema.base import Section

Number = Annotated[float, Fractional()]

MAX_VALUES = 1_000  # values of one axis
MAX_TRIALS = 10_000  # trials of one search: more are a mistake and take minutes to check
TrialCount = Annotated[int, Field(ge=1, le=MAX_TRIALS)]

# Keys that decide how trials are measured, or that trials do not use.
FIXED = {
    "train.variants": "belongs to other models; trials train `main`",
    "train.val_": "decides how trials are measured, so it is the same for all",
    "train.memory_mb": "changes no result",
    "model.pretrained": "is a path; tune one start at a time",
}


class RangeAxis(Section):
    """Base of the continuous axes."""

    kind: str
    low: Number
    """Smallest value."""
    high: Number
    """Largest value."""

    def problems(self) -> Iterator[Problem]:
        if not self.low < self.high:
            yield Problem("low", f"{self.low:g}", f"must be below high ({self.high:g})")


class UniformAxis(RangeAxis):
    """Every value between two numbers, or those in equal steps from `low`."""

    kind: Literal["uniform"]
    step: Annotated[Number, Field(gt=0)] | None = None
    """Distance of neighbouring values; null: any value."""


class LogUniformAxis(RangeAxis):
    """Every order of magnitude between two positive numbers, equally often."""

    kind: Literal["loguniform"]
    low: Annotated[Number, Field(gt=0)]
    """Smallest value, above 0."""


class IntegersAxis(RangeAxis):
    """Whole numbers from `low` to `high`, both included."""

    kind: Literal["integers"]
    low: int  # type: ignore[assignment]
    """Smallest value."""
    high: int  # type: ignore[assignment]
    """Largest value, included."""
    step: Count = 1
    """Distance of neighbouring values."""


def _axis_kind(value: Any) -> str | None:
    if isinstance(value, list):
        return "list"
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    return kind if kind in ("uniform", "loguniform", "integers") else None


def _choice_as_list(axis: Any) -> Any:
    """`{kind: choice, values: [...]}` is the list of its values."""
    if not isinstance(axis, dict) or axis.get("kind") != "choice":
        return axis
    if axis.keys() != {"kind", "values"}:
        raise ValueError("is wrong: a choice has `values` and nothing else")
    return axis["values"]


def _has_each_value_once(axis: Any) -> Any:
    if axis == []:
        raise ValueError("is empty; write the values to try")
    if isinstance(axis, list) and len(axis) > MAX_VALUES:
        raise ValueError(f"lists {len(axis)} values; at most {MAX_VALUES}, or a distribution")
    if isinstance(axis, list) and any(value in axis[:i] for i, value in enumerate(axis)):
        raise ValueError("lists a value twice; keep one")
    return axis


Axis = Annotated[
    Annotated[list[Any], Tag("list")]
    | Annotated[UniformAxis, Tag("uniform")]
    | Annotated[LogUniformAxis, Tag("loguniform")]
    | Annotated[IntegersAxis, Tag("integers")],
    Discriminator(
        _axis_kind,
        custom_error_type="axis",
        custom_error_message="is neither a list of values nor a distribution; "
        "write a list, or kind: uniform, loguniform, integers or choice",
    ),
    AfterValidator(_has_each_value_once),
    BeforeValidator(_choice_as_list),
]


class GridSearch(Section):
    """Every combination of the listed values, in the order they are written."""

    kind: Literal["grid"] = "grid"


class RandomSearch(Section):
    """Different points, drawn from the recipe's seed."""

    kind: Literal["random"]
    num_trials: TrialCount = 16
    """Trials of the search."""


class OptunaSearch(Section):
    """Tree-structured Parzen estimator (Bergstra et al. 2011): proposes from finished trials.

    The first ten trials are random. With several trials at a time its proposals depend on which of
    them ends first; what a trial measures depends on its values and the seed alone.
    """

    kind: Literal["optuna"]
    num_trials: TrialCount = 32
    """Trials of the search."""


Search = Annotated[GridSearch | RandomSearch | OptunaSearch, Field(discriminator="kind")]


class NoScheduler(Section):
    """Every trial is trained to its end."""

    kind: Literal["none"]


class AshaScheduler(Section):
    """Asynchronous successive halving (Li et al. 2020): bad trials are stopped at rungs."""

    kind: Literal["asha"] = "asha"
    grace_epochs: Count = 1
    """Epochs of the first rung; more than the epsilon warm-up of any trial."""
    reduction_factor: int = Field(default=2, ge=2)
    """One trial of this many goes on at each rung."""


class PbtScheduler(Section):
    """Population-based training (Jaderberg et al. 2017): good trials, mutated, replace bad ones.

    Its result is a schedule of values, not one recipe.
    """

    kind: Literal["pbt"]
    interval: Count = 10
    """Epochs between changes, the first after every epsilon warm-up."""
    quantile: float = Field(default=0.25, gt=0, le=0.5)
    """Top share that is copied, and bottom share that is replaced."""
    resample_prob: float = Field(default=0.25, ge=0, le=1)
    """Probability of a fresh draw; else a neighbouring value."""


Scheduler = Annotated[NoScheduler | AshaScheduler | PbtScheduler, Field(discriminator="kind")]


class ChangeSection(Section):
    """One step of an additive ablation: its values also hold in all later steps."""

    name: Annotated[str, Field(min_length=1)]
    """Name of the change in tables."""
    set: dict[str, Any] = {}
    """Keys of the recipe and their new values."""


class TuneAttack(Section):
    """The attack on validation items by which trials are compared, at the full epsilon."""

    kind: Literal["apgd-ce", "pgd"] = "apgd-ce"
    num_steps: Count = default_of(PgdSettings, "num_steps")
    """Steps of the attack."""
    num_items: Count = 1000
    """Validation items that are attacked, at most."""


class TuneSection(Section):
    """Ray Tune over dotted recipe keys; the objective is accuracy on validation items."""

    space: dict[str, Axis] = {}
    """Dotted keys of the recipe and their values or ranges."""
    changes: list[ChangeSection] = []
    """Named changes instead of a space: each on top of the earlier ones."""
    search: Search = GridSearch()
    """How points of the space are chosen."""
    scheduler: Scheduler = AshaScheduler()
    """Which trials stop early; of a grid and of a chain: none."""
    metric: Literal["val_robust_accuracy", "val_accuracy"] = "val_robust_accuracy"
    """What ranks trials."""
    attack: TuneAttack = TuneAttack()
    """The attack on validation items that ranks trials."""
    epochs: Count | None = None
    """Epochs of a trial; null: train.epochs."""
    train_items: Count | None = None
    """Training items of a trial; null: all."""

    @model_validator(mode="before")
    @classmethod
    def _pin_own_code(cls, values: Any) -> Any:
        """Pin user code that trials name before the search starts."""
        return pinned_inside(values)

    @model_validator(mode="before")
    @classmethod
    def _grids_and_chains_run_to_the_end(cls, values: Any) -> Any:
        """Stop no trial of a listed set unless the recipe asks for it: a grid is a grid."""
        if not isinstance(values, dict):
            return values
        search = values.get("search") or {}
        kind = (
            search.get("kind", "grid")
            if isinstance(search, dict)
            else getattr(search, "kind", None)
        )
        listed = values.get("changes") or kind == "grid"
        return {"scheduler": {"kind": "none"}, **values} if listed else values

    def problems(self) -> Iterator[Problem]:
        if bool(self.space) == bool(self.changes):
            yield Problem("space", "", "give either a space or a list of changes")
            return
        yield from self._change_problems()
        for place, key in self._places():
            yield from _key_problems(place, key, epochs=self.epochs)
        ranges = [key for key, axis in self.space.items() if not isinstance(axis, list)]
        if self.search.kind == "grid" and ranges:
            remedy = "is a distribution, which a grid cannot list; set search: {kind: random}"
            yield Problem(f"space.{ranges[0]}", "", remedy)
        sizes = [len(axis) for axis in self.space.values() if isinstance(axis, list)]
        if self.search.kind == "grid" and math.prod(sizes) > MAX_TRIALS:
            product = " x ".join(map(str, sizes))
            remedy = f"makes more than {MAX_TRIALS} trials; set search: {{kind: random}}"
            yield Problem("space", f"a grid of {product} values", remedy)
        if len(self.changes) > MAX_VALUES:
            yield Problem("changes", f"a chain of {len(self.changes)}", f"at most {MAX_VALUES}")
        if self.scheduler.kind == "pbt":
            yield from self._pbt_problems()

    def _change_problems(self) -> Iterator[Problem]:
        if self.changes and (self.search.kind, self.scheduler.kind) != ("grid", "none"):
            yield Problem("changes", "", "are all trained to the end; remove search and scheduler")
        names = [change.name for change in self.changes]
        if len(set(names)) < len(names):
            yield Problem("changes", names, "gives two steps the same name")

    def _pbt_problems(self) -> Iterator[Problem]:
        if self.search.kind == "optuna":
            remedy = "needs search grid or random: it proposes values itself"
            yield Problem("scheduler.kind", "pbt", remedy)
        if not self.mutable:
            remedy = f"finds no key to change in the space; it may change {', '.join(MUTABLE)}"
            yield Problem("scheduler.kind", "pbt", remedy)
        if "train.epochs" in self.space:
            yield Problem("space.train.epochs", "", "pbt compares trials of equal train.epochs")
        decay = self.space.get("train.weight_decay", [])
        if 0 in (decay if isinstance(decay, list) else [decay.low]):
            # Without decay an optimiser groups its weights differently: its state cannot be copied.
            remedy = "cannot change from or to 0 while a model trains; begin with e.g. 1e-6"
            yield Problem("space.train.weight_decay", 0, remedy)

    def _places(self) -> Iterator[tuple[str, str]]:
        """(place in the section, key) of every key that differs between trials."""
        yield from ((f"space.{key}", key) for key in self.space)
        for number, change in enumerate(self.changes):
            yield from ((f"changes.{number}.set.{key}", key) for key in change.set)

    @property
    def keys(self) -> list[str]:
        """Every key that differs between trials."""
        chained = (key for change in self.changes for key in change.set)
        return list(dict.fromkeys([*self.space, *chained]))

    @property
    def mutable(self) -> list[str]:
        """Keys of the space that may change during training."""
        return [key for key, axis in self.space.items() if key in MUTABLE and _is_numeric(axis)]

    @property
    def grace_epochs(self) -> float:
        """Epochs before a trial may be stopped; infinite without a scheduler that stops trials."""
        return self.scheduler.grace_epochs if self.scheduler.kind == "asha" else math.inf


# Keys that may change during training: those that affect neither the network nor the data.
MUTABLE = (
    "train.learning_rate",
    "train.weight_decay",
    "train.label_smoothing",
    "train.clip_norm",
    "train.objective.beta",
    "model.options.drop_path_rate",
)


def _is_numeric(axis: Any) -> bool:
    values = axis if isinstance(axis, list) else []
    return all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)


def _key_problems(place: str, key: str, *, epochs: int | None) -> Iterator[Problem]:
    if not key.startswith(("train.", "model.")):
        yield Problem(place, "", "must begin with train. or model.")
    for start, remedy in FIXED.items():
        if key.startswith(start):
            yield Problem(place, "", remedy)
    if key == "train.epochs" and epochs:
        yield Problem("epochs", epochs, f"conflicts with train.epochs in {place.split('.')[0]}")
