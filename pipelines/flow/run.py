"""The flow: what of a recipe's plan is not done yet, run in order; what came of it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from components.core.digests import digest_json
from pipelines.flow.plan import PlannedStep, plan, select
from pipelines.recipe.schema.recipe import Recipe
from pipelines.runtime import progress
from pipelines.runtime.artifacts import exclusive, is_made_from, prepare_storage


def run_flow(
    recipe: Recipe,
    *,
    storage: str | Path | None = None,
    address: str | None = None,
    force: bool = False,
    until: str | None = None,
    prepared: Path | None = None,
) -> list[PlannedStep]:
    """Run what is not finished yet, here or at `address`; returns the selected steps.

    `prepared` is a finished dataset to use in place of the recipe's own.
    """
    root = prepare_storage(str(storage or recipe.storage.root))
    with exclusive(root / recipe.name):
        everything = plan(recipe, root, prepared=prepared)
        steps = select(everything, until)
        made = [s for s in steps if not s.given]
        forced = {s.name for s in made if until in (None, s.step.stage)} if force else set()
        todo, again = _missing(made, forced)
        for step in made:
            if step not in todo:
                progress.say(f"{step.name:<16} done before  {step.folder.name}")
        if todo:
            from pipelines.flow.execute import execute

            execute(
                recipe,
                root,
                todo,
                inputs={step.name: step for step in everything},
                flow=digest_json({step.name: step.fingerprint for step in everything}),
                address=address,
                again=again,
            )
    return steps


def _missing(steps: Sequence[PlannedStep], forced: set[str]) -> tuple[list[PlannedStep], set[str]]:
    """The steps to run, and those of them that start anew: forced, or made from replaced inputs."""
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


def folder_of(steps: Sequence[PlannedStep], name: str) -> Path | None:
    """The folder of a finished step."""
    return next((s.folder for s in steps if s.name == name and s.finished), None)


def summary(steps: Sequence[PlannedStep]) -> list[dict[str, Any]]:
    """Headline rows of finished attacks and certificates: what, model, accuracy, interval."""
    from components.certify.registry import family_of

    rows: list[dict[str, Any]] = []
    models = [s.step.identity["certify"]["model"] for s in steps if s.step.stage == "certify"]
    for step in steps:
        if step.step.stage == "attack" and step.finished:
            rows += _attacked(json.loads((step.folder / "summary.json").read_text()))
        if step.step.stage == "certify" and step.finished:
            document = json.loads((step.folder / "certificate.json").read_text())
            model = step.step.identity["certify"]["model"]
            which = f", {step.step.part}" if models.count(model) > 1 else ""
            standard = document["summary"]["standard_accuracy"]
            rows.append(_headline(f"smoothed, clean{which}", model, standard))
            if label := document["summary"].get("prediction_accuracy"):
                rows.append(_headline(f"smoothed, label alone{which}", model, label))
            doubt = which if document["sound"] else f"{which} (not sound)"
            for entry in document["summary"]["certified"]:
                at = family_of(document["kind"]).budget_text(entry)
                rows.append(_headline(f"certified {at}{doubt}", model, entry["accuracy"]))
    return rows


def _attacked(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Clean accuracy, and what each line of the attack list left; the verdict with the last."""
    norm, eps = result["threat"]["kind"], result["threat"]["eps"]
    budget = norm if eps is None else f"{norm} {eps:g}"
    rows = []
    for model, page in result["models"].items():
        rows.append(_headline("clean", model, page["clean_accuracy"]))
        left = {attack["entry"]: attack["robust_accuracy"] for attack in page["attacks"]}
        rows += [_headline(f"{entry} {budget}", model, value) for entry, value in left.items()]
        if sanity := page.get("sanity"):
            rows[-1] |= {"verdict": sanity["verdict"], "reasons": sanity["reasons"]}
    return rows


def _headline(what: str, model: str, value: Mapping[str, Any]) -> dict[str, Any]:
    return {"what": what, "model": model, **value}
