"""The stages of a flow, in their order, and the steps that they add to its plan.

A stage is a folder of this package: `steps.py` defines its steps in the plan (no torch), and
`stage.py` runs one of its steps. Both are imported when they are first needed. To add a stage, add
its folder, its section in the recipe's schema, and a line below.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, Protocol, Required, TypedDict, cast

from components.core.folders import Folder

if TYPE_CHECKING:  # the command line lists stages and must not import pydantic
    from pipelines.recipe.costs import Question, StepCost
    from pipelines.recipe.schema.recipe import Recipe
    from pipelines.runtime.artifacts import StageDir

DATASET = "prepare"  # the step whose folder holds the images
GIVEN_VERSION = 1  # version of steps without a stage: a given model, a given denoiser


@dataclass(frozen=True)
class Step:
    """One stage for one part of the recipe; `identity` is everything its result depends on."""

    stage: str
    part: str = ""
    needs: tuple[str, ...] = ()
    identity: Mapping[str, object] = field(default_factory=dict)
    given: Folder | None = None  # an existing folder that is used unchanged

    @property
    def name(self) -> str:
        return f"{self.stage}.{self.part}" if self.part else self.stage

    @property
    def waits(self) -> bool:
        """Whether it needs another step of its own stage."""
        return any(need.startswith(f"{self.stage}.") for need in self.needs)


@dataclass(frozen=True)
class Planning:
    """Input of a stage's plan."""

    recipe: "Recipe"
    prepared: Folder | None = None  # a finished dataset instead of the recipe's own
    earlier: Sequence[Step] = ()  # the steps of the stages before


class Share(TypedDict):
    """A share of items with its confidence interval."""

    value: float
    low: float
    high: float
    num_items: int


class Headline(Share, total=False):
    """A row of a flow's summary; the last row of a model has the verdict on its attacks."""

    what: Required[str]
    model: Required[str]
    kind: Literal["proven"]  # a certified share: its text is rounded down
    verdict: str
    reasons: Sequence[str]


class StageSteps(Protocol):
    """`steps.py` of a stage; `headlines` and `metrics` only if `Stage` says so."""

    def steps(self, planning: Planning) -> list[Step]:
        """The steps of the stage, each after the steps it needs."""

    def headlines(self, steps: Sequence[tuple[Step, Folder | None]]) -> list[Headline]:
        """The figures of its steps, each with its folder if it is finished."""

    def metrics(self, finished: Mapping[str, Folder]) -> dict[str, float]:
        """The most important metrics of its finished steps by part, named as in their runs."""


class StageCost(Protocol):
    """`cost.py` of a stage."""

    def costs_of(self, recipe: "Recipe", asked: "Question") -> "list[StepCost]":
        """What each of its steps costs; neither data nor weights are read."""


class StageRun(Protocol):
    """`stage.py` of a stage."""

    def run(self, recipe: "Recipe", inputs: Mapping[str, Folder], out: "StageDir") -> None:
        """Make one step: from the folders of finished steps to its own."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Properties of a stage that are known before its code is loaded."""

    name: str
    section: str  # section of the recipe; without it the stage has nothing to do
    version: int  # raised by hand when its formula changes, so that old results are not reused
    help: str  # help text of its command
    context: str = "testing"  # context of its dataset in MLflow
    in_lanes: bool = False  # whether its steps run in parallel, each on its own workers
    needs_cpus: bool = False  # whether idle actors of other stages must release their CPUs
    shared: bool = False  # whether other recipes in the storage use its finished steps
    headlines: bool = False  # whether its steps have figures for the summary
    metrics: bool = False  # whether its steps have metrics for the flow's run in MLflow
    logged: tuple[str, ...] = ()  # files that the flow logs, for a stage that does not use tracking

    def steps(self) -> StageSteps:
        return cast(StageSteps, self._module("steps"))

    def cost(self) -> StageCost:
        return cast(StageCost, self._module("cost"))

    def load(self) -> StageRun:
        return cast(StageRun, self._module("stage"))

    def _module(self, name: str) -> object:
        return import_module(f"pipelines.stages.{self.name}.{name}")


def _training(name: str, version: int, context: str, help_: str, *, shared: bool) -> Stage:
    """A stage that trains models: in parallel, on CPUs that idle actors have released."""
    return Stage(
        name,
        name,
        version,
        help_,
        context,
        in_lanes=True,
        needs_cpus=True,
        shared=shared,
        metrics=True,
    )


STAGES = {
    stage.name: stage
    for stage in (
        Stage(
            "prepare",
            section="data",
            version=2,
            help="Prepare the recipe's dataset.",
            context="preparation",
            needs_cpus=True,
            shared=True,
        ),
        _training(
            "train", 4, "training", "Train the recipe's models, preparing data first.", shared=True
        ),
        _training(
            "tune",
            5,
            "tuning",
            "Tune the recipe; the best one is written as best.yaml.",
            shared=False,  # best.yaml names the recipe
        ),
        Stage(
            "attack",
            section="attack",
            version=5,
            help="Attack a recipe's models, training them first, or any model on any data.",
            headlines=True,
            metrics=True,
        ),
        Stage(
            "evaluate",
            section="evaluate",
            version=1,
            help="Evaluate a recipe's models, training them first, or any model on any data.",
            headlines=True,
            metrics=True,
        ),
        Stage(
            "analyze",
            section="analyze",
            version=1,
            help="Analyze a recipe's models, training them first, or any model on any data.",
            headlines=True,
            metrics=True,
        ),
        Stage(
            "certify",
            section="certify",
            version=2,
            help="Certify a recipe's models, training them first, or any model on any data.",
            headlines=True,
            metrics=True,
        ),
        Stage(
            "report",
            section="report",
            version=3,
            help="Run what the report needs, then write it.",
            logged=("report.html",),
        ),
    )
}


def stages_of(recipe: "Recipe") -> list[Stage]:
    """The stages that a recipe uses; the data are not read."""
    return [stage for stage in STAGES.values() if recipe.needs_stage(stage.section)]


def headline(what: str, model: str, share: Mapping[str, Any]) -> Headline:
    """A row of a flow's summary."""
    return cast(Headline, {"what": what, "model": model, **share})


def stored_metrics(stage: str, finished: Mapping[str, Folder]) -> dict[str, float]:
    """Rows of `metrics.parquet` that are headlines, named as in the runs of their steps."""
    from components.evaluate.metrics import METRICS_NAME, mlflow_name, read_metrics

    values = {}
    for part, folder in finished.items():
        shown = {
            (row["model"], row["value"], row["low"], row["high"], row["num_items"])
            for row in json.loads((folder / "summary.json").read_text())["headlines"]
        }
        rows = read_metrics(folder / METRICS_NAME)
        several = len({row.model for row in rows}) > 1
        for row in rows:
            is_whole = row.level is None or row.suite == "transfer"
            if is_whole and (row.model, row.value, row.lo95, row.hi95, row.n) in shown:
                prefix, name = f"{stage}/{row.suite}/", mlflow_name(row, stage=stage)
                own = f"{prefix}{row.model}/{name.removeprefix(prefix)}"
                values[own if several or row.suite != part else name] = float(row.value or 0.0)
    return values


def stored_headlines(steps: Sequence[tuple[Step, Folder | None]]) -> list[Headline]:
    """The figures that finished steps wrote to their `summary.json`."""
    folders = [folder for _, folder in steps if folder]
    rows = [json.loads((folder / "summary.json").read_text())["headlines"] for folder in folders]
    return [row for found in rows for row in found]
