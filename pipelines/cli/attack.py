"""The attack command: a recipe's models, or any model folder on any data."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from components.core.errors import CasemateError
from pipelines.api import load_recipe
from pipelines.cli.flow import run_and_show
from pipelines.cli.options import (
    AddressOpt,
    ForceOpt,
    JsonOpt,
    SetOpt,
    SmokeOpt,
    StorageOpt,
)

if TYPE_CHECKING:
    from components.models.spec import ModelSpec
    from pipelines.recipe.schema.recipe import Recipe

EXAMPLE = (
    "Example: casemate attack demo   Without a recipe: casemate attack --model models/deit-s "
    "--data imagenet --data-path imagenet --eps 4/255 --attacks pgd-20,apgd-ce"
)


def attack(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="A ready recipe's name or a YAML path.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Attack this model folder, without a recipe.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="DIR|SOURCE", help="Prepared dataset, or a source.")
    ] = None,
    data_path: Annotated[
        str | None, typer.Option(metavar="P", help="Files of the source, if it needs any.")
    ] = None,
    fit: Annotated[
        str | None, typer.Option(help="pad, resize or crop a source's images; default: pad.")
    ] = None,
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
        for key, value in alone.items():
            if value is not None:
                raise CasemateError(key, value, "cannot be combined with RECIPE, which sets it")
        loaded = load_recipe(recipe, overrides=set_ or [], smoke=smoke)
    else:
        missing = [key for key, value in needed.items() if value is None]
        if missing:
            remedy = "is missing; name a RECIPE, or --model, --data and --eps"
            raise CasemateError("attack", missing[0], remedy)
        if num_items is not None and num_items < 1:
            raise CasemateError("--num-items", num_items, "must be at least 1")
        assert model is not None
        assert data is not None
        prepared = _prepared(data, data_path=data_path, fit=fit)
        section = {
            "norm": norm or "linf",
            "eps": eps,
            "attacks": read_attack_list(attacks or "autoattack", key="--attacks"),
            "num_items": num_items,
        }
        source = {"source": data, "path": data_path, "fit": fit or "pad"}
        loaded = _recipe(model, source, section, prepared, overrides=set_ or [], smoke=smoke)
    run_and_show(
        loaded,
        storage=storage,
        force=force,
        address=address,
        as_json=as_json,
        until="attack",
        prepared=prepared,
    )


def _prepared(data: str, **of_sources: str | None) -> Path | None:
    """The folder, if `data` is one; None for the name of a source."""
    folder = Path(data)
    if (folder / "dataset.json").is_file():
        for key, value in of_sources.items():
            if value is not None:
                option = "--" + key.replace("_", "-")
                raise CasemateError(option, value, "does not apply to a prepared dataset")
        return folder.absolute()
    if folder.is_dir():
        remedy = "has no dataset.json; name a prepared dataset, or a source with --data-path"
        raise CasemateError("--data", data, remedy)
    return None


def _recipe(
    model: Path,
    source: Mapping[str, object],
    section: Mapping[str, object],
    prepared: Path | None,
    *,
    overrides: list[str],
    smoke: bool,
) -> "Recipe":
    """The recipe that the options describe: no training, one model folder, one list of attacks."""
    import yaml

    from components.models.checkpoint import read_header
    from components.models.spec import ModelSpec
    from pipelines.recipe import load as recipe

    folder = model.expanduser().absolute()
    spec = ModelSpec.from_dict(read_header(folder)["spec"], source=str(folder / "model.json"))
    values = {
        "name": "attack-" + (re.sub(r"[^a-z0-9]+", "-", model.name.lower()).strip("-") or "model"),
        "data": _data(source, spec, prepared),
        "model": {"pretrained": str(folder)},
        "attack": {section["norm"]: dict(section)},
    }
    loaded = recipe.loads(
        yaml.safe_dump(values), source="casemate attack", overrides=overrides, smoke=smoke
    )
    if prepared is None:  # fail before thousands of images are prepared
        from components.data.sources import open_source

        chosen = loaded.data
        opened = open_source(chosen.source, path=chosen.path, options=chosen.options)
        spec.check_classes(len(opened.classes))
    return loaded


def _data(
    source: Mapping[str, object], spec: "ModelSpec", prepared: Path | None
) -> dict[str, object]:
    """The data section: a prepared folder must fit the model, a source is fitted to it."""
    if prepared is None:
        return {**source, "image_size": spec.image_size, "channels": spec.channels}
    from components.data.prepared import PreparedDataset

    dataset = PreparedDataset.open(prepared)
    spec.check_image((dataset.channels, dataset.height, dataset.width))
    spec.check_classes(len(dataset.classes))
    return {"source": "parquet", "path": str(prepared)}
