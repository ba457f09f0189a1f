"""Shared by all commands that run a flow: load, run, print figures and folders."""

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.core.errors import CasemateError

if TYPE_CHECKING:
    from pipelines.recipe.schema.recipe import Recipe


def load_recipe(name: str, overrides: list[str] | None, smoke: bool) -> "Recipe":
    """The recipe of a command line."""
    from pipelines.recipe.load import load

    return load(name, overrides=overrides or [], smoke=smoke)


def run_and_show(
    recipe: "Recipe",
    *,
    storage: str | None,
    force: bool,
    address: str | None,
    as_json: bool,
    until: str | None,
    prepared: Path | None = None,
) -> None:
    """Run a flow or a part of it and print its figures and folders."""
    from pipelines.flow.run import run_flow
    from pipelines.flow.summary import folder_of, summary

    steps = run_flow(
        recipe, storage=storage, address=address, force=force, until=until, prepared=prepared
    )
    root = Path(storage or recipe.storage.root).resolve()
    uri = recipe.tracking.uri or f"sqlite:///{root}/mlflow.db"
    report = folder_of(steps, "report")
    found = {
        "report": str(report / "report.html") if report else None,
        "tracking_uri": uri,
        "steps": {step.name: str(step.folder) for step in steps},
        "summary": summary(steps),
    }
    print(json.dumps(found, indent=2)) if as_json else _show(found)


def check_resumable(recipe: "Recipe", *, storage: str | None, force: bool) -> None:
    """Refuse `--resume` if a training would start from scratch, or if none is left."""
    from pipelines.flow.plan import plan, select
    from pipelines.runtime.artifacts import SCRATCH
    from pipelines.stages.train.worker import has_checkpoint

    if force:
        raise CasemateError("--resume", "--force", "begins anew; leave one of the two out")
    root = Path(storage or recipe.storage.root)
    steps = [s for s in select(plan(recipe, root), "train") if s.step.stage == "train"]
    left = [step for step in steps if not step.finished]
    if any(has_checkpoint(step.folder / SCRATCH) for step in left):
        return
    why = "holds no checkpoint of these trainings" if left else "holds these trainings finished"
    command = shlex.join(["casemate", *(word for word in sys.argv[1:] if word != "--resume")])
    raise CasemateError("--resume", root / recipe.name, f"{why}; start without it: {command}")


def _show(found: dict[str, Any]) -> None:
    for row in found["summary"]:
        spread = f"[{100 * row['low']:.1f}, {100 * row['high']:.1f}]"
        percent = int(1000 * row["value"]) / 10  # down: never above the measured figure
        print(
            f"{row['what']:<28} {row['model']:<10} {percent:5.1f} %  "
            f"95% {spread:<14} n={row['num_items']}"
        )
        if "verdict" in row:
            print(f"{'  attacks on ' + row['model']:<39} {row['verdict']}")
            for reason in row["reasons"]:
                print(f"    {reason}")
    if found["report"]:
        print(f"report: {found['report']}")
    print(f"mlflow: mlflow ui --backend-store-uri '{found['tracking_uri']}'")
