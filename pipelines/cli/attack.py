"""The attack command: a recipe's models, or any model folder on any data."""

from pathlib import Path
from typing import Annotated, Any

import typer

from components.core.errors import CasemateError
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
    "Example: casemate attack demo   Without a recipe: casemate attack --model models/deit-s "
    "--data imagenet --data-path imagenet --eps 4/255 --attacks pgd-20,apgd-ce"
)


def attack(
    recipe: NoRecipeArg = None,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Attack this model folder, without a recipe.")
    ] = None,
    data: DataOpt = None,
    data_path: DataPathOpt = None,
    fit: FitOpt = None,
    eps: Annotated[str | None, typer.Option(help="Budget, e.g. 8/255.")] = None,
    norm: Annotated[str | None, typer.Option(help="linf or l2; default: linf.")] = None,
    attacks: Annotated[
        str | None,
        typer.Option(help="E.g. fgsm,pgd-20,apgd-ce,square-1000; default: autoattack."),
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
    """Attack a recipe's models, training them first, or a model folder on any data."""
    from components.attacks.short_form import read_attack_list

    needed = {"--model": model, "--data": data, "--eps": eps}
    alone = {
        **needed,
        **{"--data-path": data_path, "--fit": fit, "--norm": norm},
        **{"--attacks": attacks, "--num-items": num_items},
    }
    prepared = None
    if recipe is not None:
        refuse_beside_recipe(alone)
        loaded = load_recipe(recipe, overrides=set_ or [], smoke=smoke)
    else:
        missing = [key for key, value in needed.items() if value is None]
        if missing:
            remedy = "is missing; name a RECIPE, or --model, --data and --eps"
            raise CasemateError("attack", missing[0], remedy)
        check_num_items(num_items)
        assert model is not None
        assert data is not None
        prepared = prepared_folder(data, data_path=data_path, fit=fit)
        section: dict[str, Any] = {
            "norm": norm or "linf",
            "eps": eps,
            "attacks": read_attack_list(attacks or "autoattack", key="--attacks"),
            "num_items": num_items,
        }
        source = {"source": data, "path": data_path, "fit": fit or "pad"}
        sections = {section["norm"]: section}
        loaded = recipe_of(
            "attack", model, source, sections, prepared, overrides=set_ or [], smoke=smoke
        )
    run_and_show(
        loaded,
        storage=storage,
        force=force,
        address=address,
        as_json=as_json,
        until="attack",
        prepared=prepared,
    )
