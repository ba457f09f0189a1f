"""The analyze command: a recipe's models, or any model folder on any data."""

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
    "Example: casemate analyze my-recipe.yaml --set analyze.lesions.num_samples=10   Without a "
    "recipe: casemate analyze --model models/deit-s --data imagenet --data-path imagenet "
    "--study correlation,lesions"
)
STUDIES = (
    "correlation", "lesions", "restricted_attention", "gaps", "perturbations", "accumulation",
)  # fmt: skip
FROM_NOISE = "accumulation"  # the study without items


def analyze(
    recipe: NoRecipeArg = None,
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Analyze this model folder, without a recipe."),
    ] = None,
    data: DataOpt = None,
    data_path: DataPathOpt = None,
    fit: FitOpt = None,
    study: Annotated[
        str | None, typer.Option(help=f"Of {', '.join(STUDIES)}, with commas.")
    ] = None,
    num_items: Annotated[
        int | None,
        typer.Option(help="Number of test items, at least 1; default: that of each study."),
    ] = None,
    set_: SetOpt = None,
    storage: StorageOpt = None,
    smoke: SmokeOpt = False,
    force: ForceOpt = False,
    address: AddressOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Analyze a recipe's models, training them first, or a model folder on any data."""
    needed = {"--model": model, "--data": data, "--study": study}
    alone = {**needed, "--data-path": data_path, "--fit": fit, "--num-items": num_items}
    prepared, changes = None, set_ or []
    if recipe is not None:
        refuse_beside_recipe(alone)
        loaded = load_recipe(recipe, overrides=changes, smoke=smoke)
    else:
        if missing := [key for key, value in needed.items() if value is None]:
            remedy = "is missing; name a RECIPE, or --model, --data and --study"
            raise CasemateError("analyze", missing[0], remedy)
        check_num_items(num_items)
        assert model is not None
        assert data is not None
        assert study is not None
        prepared = prepared_folder(data, data_path=data_path, fit=fit)
        source = {"source": data, "path": data_path, "fit": fit or "pad"}
        loaded = recipe_of("analyze", model, source, _studies(study, num_items), prepared,
                           overrides=changes, smoke=smoke)  # fmt: skip
    run_and_show(
        loaded,
        storage=storage,
        force=force,
        address=address,
        as_json=as_json,
        until="analyze",
        prepared=prepared,
    )


def _studies(text: str, num_items: int | None) -> dict[str, Any]:
    """A section for each study, with its number of items if that is given."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in STUDIES:
            raise CasemateError("--study", repr(name), did_you_mean(name, STUDIES))
    if num_items is None:
        return {name: {} for name in names}
    return {
        name: {} if name == FROM_NOISE else {"subset": {"num_items": num_items}} for name in names
    }
