"""Runs the unfinished steps of a recipe's plan, stage after stage.

Light to import: a flow whose steps are all finished needs neither Ray nor MLflow.
"""

from collections.abc import Sequence
from pathlib import Path

from components.core.digests import digest_json
from components.core.folders import Folder
from pipelines.flow.plan import PlannedStep, plan, select
from pipelines.flow.sharing import announce, is_own, own, shared
from pipelines.recipe.schema.recipe import Recipe
from pipelines.runtime import progress
from pipelines.runtime.forwarding import in_job
from pipelines.runtime.step_locks import AFTER_LOSS, hold
from pipelines.runtime.storage import open_storage
from pipelines.runtime.tracking_uri import flow_outboxes


def run_flow(
    recipe: Recipe,
    *,
    storage: str | Path | None = None,
    address: str | None = None,
    force: bool = False,
    until: str | None = None,
    prepared: Folder | None = None,
) -> list[PlannedStep]:
    """Run the unfinished steps, here or at `address`; returns the selected steps.

    `prepared` is a finished dataset to use instead of the recipe's own.
    """
    root = open_storage(storage or recipe.storage.root)
    everything = plan(recipe, root, prepared=prepared)
    steps = select(everything, until)
    forced = {s.name for s in steps if until in (None, s.step.stage)} if force else set[str]()
    # A job follows others; one that was lost with its machine holds its locks until they expire.
    patience = AFTER_LOSS if in_job() else 0.0
    while True:
        everything = _placed(everything, forced)
        steps = [step for step in everything if step.name in {other.name for other in steps}]
        made = [step for step in steps if not step.given]
        todo, again = _missing(made, forced)
        done = [step for step in made if step not in todo]
        with hold(root.store, [step.place.key for step in todo], wait=patience) as held:
            if todo and _missing(made, forced) != (todo, again):
                continue  # another run has finished steps in between
            for step in done:
                elsewhere = "" if is_own(step) else f" of {step.place.recipe}"
                progress.say(f"{step.name:<16} done before  {step.place.name}{elsewhere}")
                if is_own(step):
                    announce(step)  # one of version 0.1 was never announced
            if todo:
                progress.say(f"{recipe.name}: {len(todo)} of {len(made)} steps to run, into {root}")
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
                    held=held,
                )
            elif unsent := flow_outboxes(root.path / recipe.name, flow):
                from pipelines.flow.execute import complete_flow

                complete_flow(recipe, root, flow, unsent, steps=everything)
        return steps


def _placed(steps: Sequence[PlannedStep], forced: set[str]) -> list[PlannedStep]:
    """The steps with equal ones of other recipes in place of own ones that are to be made.

    What is forced, or was made from other inputs than there are now, is made in the own folder.
    """
    placed = [own(step) if step.name in forced else shared(step) for step in steps]
    known = {step.name: step for step in placed}
    for step in placed:
        needs = [known[need] for need in step.step.needs if not known[need].given]
        if not is_own(step) and not _is_made_from(step, needs):
            known[step.name] = own(step)
    return list(known.values())


def _missing(steps: Sequence[PlannedStep], forced: set[str]) -> tuple[list[PlannedStep], set[str]]:
    """The steps to run, and those to run again: forced, or made from replaced inputs."""
    known = {step.name: step for step in steps}
    todo: list[PlannedStep] = []
    again = set(forced)
    for step in steps:
        needs = [need for need in step.step.needs if need in known]  # given ones never change
        if step.name not in forced and step.finished:
            waiting = any(other.name in needs for other in todo)
            if not waiting and _is_made_from(step, [known[need] for need in needs]):
                continue
            again.add(step.name)
        todo.append(step)
    return todo, again


def _is_made_from(step: PlannedStep, needs: Sequence[PlannedStep]) -> bool:
    """Whether a finished step was made from the current contents of its inputs."""
    manifest = step.manifest()
    if manifest is None:
        return False
    for need in needs:
        now, then = need.manifest(), manifest.inputs.get(need.name)
        if now is None or then is None or then["content"] != now.content:
            return False
    return True
