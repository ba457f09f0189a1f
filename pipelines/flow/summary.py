"""The headline figures of a flow's finished steps."""

from collections.abc import Sequence

from components.core.folders import Folder
from pipelines.flow.plan import PlannedStep
from pipelines.stages.registry import STAGES, Headline
from pipelines.stages.tune.outcome import SearchOutcome, search_outcome


def summary(steps: Sequence[PlannedStep]) -> list[Headline]:
    """Headline rows of finished steps: what, model, share of items with its interval."""
    rows: list[Headline] = []
    for stage in STAGES.values():
        if stage.headlines:
            own = [step for step in steps if step.step.stage == stage.name]
            found = [(step.step, step.contents() if step.finished else None) for step in own]
            rows += stage.steps().headlines(found)
    return rows


def searched(steps: Sequence[PlannedStep]) -> SearchOutcome | None:
    """The best trial of the flow's search, if it has a finished one."""
    found = [step for step in steps if step.step.stage == "tune" and step.finished]
    return search_outcome(found[0].contents(), shown=found[0].shown()) if found else None


def folder_of(steps: Sequence[PlannedStep], name: str) -> Folder | None:
    """The folder of a finished step."""
    return next((s.shown() for s in steps if s.name == name and s.finished), None)


def metrics(finished: Sequence[PlannedStep]) -> dict[str, float]:
    """The most important metrics of finished steps, named as in the runs of the steps."""
    values: dict[str, float] = {}
    for stage in STAGES.values():
        own = {s.step.part: s.contents() for s in finished if s.step.stage == stage.name}
        if own and stage.metrics:
            values |= stage.steps().metrics(own)
    return values
