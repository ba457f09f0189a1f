"""The evaluate command: a recipe's models, or any model folder on any data."""

from pathlib import Path
from typing import Annotated, Any

import typer

from components.core.errors import CasemateError
from components.core.hints import did_you_mean
from pipelines.api import load_recipe
from pipelines.cli.flow import run_and_show
from pipelines.cli.given_model import (
    check_num_items,
    prepared_folder,
    recipe_of,
    refuse_beside_recipe,
)
from pipelines.cli.options import (
    AddressOpt,
    DataOpt,
    DataPathOpt,
    FitOpt,
    ForceOpt,
    JsonOpt,
    NoRecipeArg,
    SetOpt,
    SmokeOpt,
    StorageOpt,
)

EXAMPLE = (
    "Example: casemate evaluate demo --set evaluate.corruptions.names=benchmark   Without a "
    "recipe: casemate evaluate --model models/deit-s --data imagenet --data-path imagenet "
    "--suite corruptions,spatial"
)
SUITES = ("clean", "corruptions", "shifts", "shape_bias", "transfer", "spatial")
NEEDS = {  # keys that have no default
    "shifts": "add --set evaluate.shifts.NAME.path=DIR, and its source if it is not prepared",
    "shape_bias": "add --set evaluate.shape_bias.path=DIR",
}


def evaluate(
    recipe: NoRecipeArg = None,
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Evaluate this model folder, without a recipe."),
    ] = None,
    data: DataOpt = None,
    data_path: DataPathOpt = None,
    fit: FitOpt = None,
    suite: Annotated[
        str | None,
        typer.Option(help=f"Of {', '.join(SUITES[1:])}, with commas; default: clean items only."),
    ] = None,
    num_items: Annotated[
        int | None, typer.Option(help="Number of test items, at least 1; default: all.")
    ] = None,
    set_: SetOpt = None,
    storage: StorageOpt = None,
    smoke: SmokeOpt = False,
    force: ForceOpt = False,
    address: AddressOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Evaluate a recipe's models, training them first, or a model folder on any data."""
    needed = {"--model": model, "--data": data}
    alone = {
        **needed,
        **{"--data-path": data_path, "--fit": fit},
        **{"--suite": suite, "--num-items": num_items},
    }
    prepared, changes = None, set_ or []
    if recipe is not None:
        refuse_beside_recipe(alone)
        loaded = load_recipe(recipe, overrides=changes, smoke=smoke)
    else:
        if missing := [key for key, value in needed.items() if value is None]:
            remedy = "is missing; name a RECIPE, or --model and --data"
            raise CasemateError("evaluate", missing[0], remedy)
        check_num_items(num_items)
        assert model is not None
        assert data is not None
        prepared = prepared_folder(data, data_path=data_path, fit=fit)
        section = {**_suites(suite or "", changes), "subset": {"num_items": num_items}}
        source = {"source": data, "path": data_path, "fit": fit or "pad"}
        loaded = recipe_of("evaluate", model, source, section, prepared, overrides=changes,
                           smoke=smoke)  # fmt: skip
    run_and_show(
        loaded,
        storage=storage,
        force=force,
        address=address,
        as_json=as_json,
        until="evaluate",
        prepared=prepared,
    )


def _suites(text: str, changes: list[str]) -> dict[str, Any]:
    """An empty section for each suite; those that need a path must have it among the changes."""
    names = [name.strip() for name in text.split(",")] if text else []
    for name in names:
        if name not in SUITES:
            raise CasemateError("--suite", repr(name), did_you_mean(name, SUITES))
        written = any(change.startswith(f"evaluate.{name}.") for change in changes)
        if name in NEEDS and not written:
            raise CasemateError("--suite", name, f"needs the place of its images; {NEEDS[name]}")
    return {name: {} for name in names if name != "clean"}
