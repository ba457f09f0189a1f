"""`casemate run` and a command per stage: load, run, print figures and folders."""

import json
import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from components.core.errors import CasemateError
from components.core.folders import Folder
from components.core.object_stores import is_uri
from components.core.shares import ShareKind, interval_ends, measured_percent, percent
from pipelines import api
from pipelines.cli.options import AddressOpt, Chosen, JsonOpt, takes_recipe
from pipelines.stages.registry import STAGES

if TYPE_CHECKING:
    from pipelines.recipe.schema.recipe import Recipe
    from pipelines.stages.tune.outcome import SearchOutcome


def add_commands(app: typer.Typer, own: Mapping[str, tuple[Callable[..., None], str]]) -> None:
    """`run`, then the stages; `own` are commands that take more than a recipe, with examples."""
    own = {"train": (_train, "Example: casemate train demo --resume"), **own}
    help_ = "Run a recipe's whole chain; finished steps are skipped."
    for name, text in {"run": help_, **{s.name: s.help for s in STAGES.values()}}.items():
        example = f"Example: casemate {name} demo --set train.epochs=2"
        until = None if name == "run" else name
        command, example = own.get(name) or (_flow_command(until), example)
        app.command(name, help=text, epilog=example)(command)


def _flow_command(until: str | None) -> Callable[..., None]:
    """The command that runs a flow up to a stage; None: the whole flow, the command `run`."""

    @takes_recipe
    def command(chosen: Chosen, address: AddressOpt = None, as_json: JsonOpt = False) -> None:
        _run(chosen, address=address, as_json=as_json, until=until)

    return command


@takes_recipe
def _train(
    chosen: Chosen,
    resume: Annotated[
        bool, typer.Option("--resume", help="Only continue an unfinished training.")
    ] = False,
    address: AddressOpt = None,
    as_json: JsonOpt = False,
) -> None:
    if resume:
        check_resumable(_loaded(chosen), storage=chosen.storage, force=chosen.force)
    _run(chosen, address=address, as_json=as_json, until="train")


def _loaded(chosen: Chosen) -> "Recipe":
    with reading(chosen.recipe):
        return api.load_recipe(chosen.recipe, overrides=chosen.set_ or [], smoke=chosen.smoke)


def reading(recipe: str) -> AbstractContextManager[None]:
    """Show at once that a recipe is read: what it names takes seconds to import."""
    from pipelines.runtime.progress import busy

    return busy(f"{recipe}: reading and checking the recipe")


def _run(chosen: Chosen, *, address: str | None, as_json: bool, until: str | None) -> None:
    run_and_show(
        _loaded(chosen),
        storage=chosen.storage,
        force=chosen.force,
        address=address,
        as_json=as_json,
        until=until,
    )


def run_and_show(
    recipe: "Recipe",
    *,
    storage: str | None = None,
    force: bool = False,
    address: str | None = None,
    as_json: bool = False,
    until: str | None = None,
    prepared: Folder | None = None,
) -> None:
    """Run a flow or a part of it and print its figures and folders."""
    done = api.run(
        recipe, storage=storage, address=address, force=force, until=until, prepared=prepared
    )
    found = {
        "report": str(done.report) if done.report else None,
        "report_step": str(done.steps.get("report", "")) or None,
        "tracking_uri": done.tracking_uri,
        "steps": {name: str(folder) for name, folder in done.steps.items()},
        "summary": done.summary,
        "tuned": done.tuned,
    }
    print(json.dumps(found, indent=2)) if as_json else _show(found)


def check_resumable(recipe: "Recipe", *, storage: str | None, force: bool) -> None:
    """Refuse `--resume` if no training has a checkpoint, or if all are finished."""
    from pipelines.flow.plan import plan, select
    from pipelines.runtime.storage import Storage
    from pipelines.stages.train.worker import has_checkpoint

    if force:
        raise CasemateError("--resume", "--force", "starts from scratch; leave out one of the two")
    root = Storage.at(storage or recipe.storage.root)
    steps = [s for s in select(plan(recipe, root), "train") if s.step.stage == "train"]
    left = [step for step in steps if not step.finished]
    if any(has_checkpoint(step.place) for step in left):
        return
    why = "has no checkpoint of these trainings" if left else "has only finished trainings"
    command = shlex.join(["casemate", *(word for word in sys.argv[1:] if word != "--resume")])
    raise CasemateError("--resume", f"{root}/{recipe.name}", f"{why}; start without it: {command}")


def show_search(tuned: "SearchOutcome") -> None:
    """The best trial: its score as the other figures, its values and the recipe made of them."""
    score, trial = tuned["score"], f"trial {tuned['trial']}"
    shown = percent(score["value"], score["num_items"], "measured")
    spread = "[{}, {}]".format(*interval_ends(score["low"], score["high"]))
    print(
        f"{tuned['metric']:<28} {trial:<10} {shown:>6} %  "
        f"95% {spread:<14} n={score['num_items']} (validation)"
    )
    values = ", ".join(f"{key}: {value}" for key, value in tuned["values"].items())
    early, tied = tuned["num_stopped_early"], tuned["num_tied"]
    stopped = f", {early} stopped early" if early else ""
    stopped += f", {tied} not significantly worse" if tied else ""
    print(f"  best of {tuned['num_trials']} trials{stopped}: {values or tuned['name']}")
    if tuned["at_chance"]:
        print(
            f"  at chance: the most frequent label everywhere scores "
            f"{measured_percent(tuned['chance'] or 0)} %; train longer or on more items"
        )
    print(f"  best recipe: {tuned['best_recipe']}")


def _show(found: dict[str, Any]) -> None:
    from pipelines.runtime.tracking_uri import how_to_open

    for row in found["summary"]:
        kind: ShareKind = row.get("kind", "measured")
        shown = percent(row["value"], row["num_items"], kind)
        shown += " " * (kind == "proven")  # one digit less: the points stay below each other
        spread = "[{}, {}]".format(*interval_ends(row["low"], row["high"]))
        print(
            f"{row['what']:<28} {row['model']:<10} {shown:>6} %  "
            f"95% {spread:<14} n={row['num_items']}"
        )
        if "verdict" in row:
            print(f"{'  attacks on ' + row['model']:<39} {row['verdict']}")
            for reason in row["reasons"]:
                print(f"    {reason}")
    if found["tuned"]:
        show_search(found["tuned"])
    if found["report"]:
        stored = found["report_step"] or ""
        print(f"report: {found['report']}{f' (of {stored})' if is_uri(stored) else ''}")
    print(f"mlflow: {how_to_open(found['tracking_uri'])}")
