"""Runs the unfinished steps of a recipe's plan, stage after stage.

Light to import: a flow whose steps are all finished needs neither Ray nor MLflow.
"""

from collections.abc import Sequence
from pathlib import Path

from components.core.digests import digest_json
from pipelines.flow.plan import PlannedStep, plan, select
from pipelines.recipe.schema.recipe import Recipe
from pipelines.runtime import progress
from pipelines.runtime.artifacts import hold, is_made_from, prepare_storage
from pipelines.runtime.tracking_uri import flow_outboxes


def run_flow(
    recipe: Recipe,
    *,
    storage: str | Path | None = None,
    address: str | None = None,
    force: bool = False,
    until: str | None = None,
    prepared: Path | None = None,
) -> list[PlannedStep]:
    """Run the unfinished steps, here or at `address`; returns the selected steps.

    `prepared` is a finished dataset to use instead of the recipe's own.
    """
    root = prepare_storage(str(storage or recipe.storage.root))
    everything = plan(recipe, root, prepared=prepared)
    steps = select(everything, until)
    made = [s for s in steps if not s.given]
    forced = {s.name for s in made if until in (None, s.step.stage)} if force else set()
    while True:
        todo, again = _missing(made, forced)
        done = [step for step in made if step not in todo]
        with hold(root / recipe.name, write=_folders(todo), read=_folders(done)):
            if todo and _missing(made, forced) != (todo, again):
                continue  # another run has finished steps in between
            for step in done:
                progress.say(f"{step.name:<16} done before  {step.folder.name}")
            flow = digest_json({step.name: step.fingerprint for step in everything})
            if todo:
                from pipelines.flow.execute import execute

                execute(
                    recipe,
                    root,
                    todo,
                    inputs={step.name: step for step in everything},
                    flow=flow,
                    address=address,
                    again=again,
                )
            elif unsent := flow_outboxes(root / recipe.name, flow):
                from pipelines.flow.execute import complete_flow

                complete_flow(recipe, root, flow, unsent)
        return steps


def _folders(steps: Sequence[PlannedStep]) -> list[str]:
    return [step.folder.name for step in steps]


def _missing(steps: Sequence[PlannedStep], forced: set[str]) -> tuple[list[PlannedStep], set[str]]:
    """The steps to run, and those to run again: forced, or made from replaced inputs."""
    folders = {step.name: step.folder for step in steps}
    todo: list[PlannedStep] = []
    again = set(forced)
    for step in steps:
        needs = [need for need in step.step.needs if need in folders]  # given ones never change
        if step.name not in forced and step.finished:
            waiting = any(other.name in needs for other in todo)
            if not waiting and is_made_from(step.folder, {n: folders[n] for n in needs}):
                continue
            again.add(step.name)
        todo.append(step)
    return todo, again
