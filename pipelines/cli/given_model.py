"""Commands that take a recipe, or a model folder and any data: these describe a recipe."""

import re
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from components.core.errors import CasemateError
from components.core.folders import Folder, absolute, folder_at
from components.core.object_stores import is_uri
from pipelines.api import load_recipe
from pipelines.cli.flow import run_and_show
from pipelines.cli.options import (
    AddressOpt,
    Command,
    DataOpt,
    DataPathOpt,
    FitOpt,
    ForceOpt,
    JsonOpt,
    NoRecipeArg,
    SetOpt,
    SmokeOpt,
    StorageOpt,
    with_parameters,
)

if TYPE_CHECKING:
    from components.models.spec import ModelSpec
    from pipelines.recipe.schema.recipe import Recipe

Section = dict[str, Any]  # of the recipe


def model_command(
    stage: str, section_of: Callable[..., Section], *, required: Sequence[str] = ()
) -> Command:
    """The command of a stage, with the options of `section_of` after those of model and data.

    `section_of(overrides, **options)` returns the section of the stage. Without a recipe, the
    options `required` are needed beside model and data.
    """

    def command(
        recipe: NoRecipeArg = None,
        model: Annotated[
            str | None,
            typer.Option(
                metavar="DIR", help=f"{stage.capitalize()} this model folder, without a recipe."
            ),
        ] = None,
        data: DataOpt = None,
        data_path: DataPathOpt = None,
        fit: FitOpt = None,
        set_: SetOpt = None,
        storage: StorageOpt = None,
        smoke: SmokeOpt = False,
        force: ForceOpt = False,
        address: AddressOpt = None,
        as_json: JsonOpt = False,
        **own: Any,
    ) -> None:
        prepared, overrides = None, set_ or []
        given = {"model": model, "data": data, "data_path": data_path, "fit": fit, **own}
        needed = {key: given[key] for key in ("model", "data", *required)}
        if recipe is not None:
            _refuse_beside_recipe({**needed, **given})
            loaded = load_recipe(recipe, overrides=overrides, smoke=smoke)
        else:
            _check_needed(stage, needed)
            _check_num_items(own["num_items"])
            assert model is not None
            assert data is not None
            prepared = _prepared_folder(data, data_path=data_path, fit=fit)
            source = {"source": data, "path": data_path, "fit": fit or "pad"}
            loaded = _recipe_of(
                stage, model, source, section_of(overrides, **own), prepared,
                overrides=overrides, smoke=smoke,
            )  # fmt: skip
        run_and_show(
            loaded,
            storage=storage,
            force=force,
            address=address,
            as_json=as_json,
            until=stage,
            prepared=prepared,
        )

    parameters = signature(command).parameters.values()
    shared = [p for p in parameters if p.kind is not Parameter.VAR_KEYWORD]
    place = [p.name for p in shared].index("set_")
    _, *own_options = signature(section_of).parameters.values()
    return with_parameters(command, [*shared[:place], *own_options, *shared[place:]])


def _refuse_beside_recipe(options: Mapping[str, object]) -> None:
    """Refuse options that the recipe sets itself."""
    for key, value in options.items():
        if value is not None:
            raise CasemateError(_flag(key), value, "cannot be combined with RECIPE, which sets it")


def _check_needed(stage: str, options: Mapping[str, object]) -> None:
    *others, last = map(_flag, options)
    for key, value in options.items():
        if value is None:
            remedy = f"is missing; name a RECIPE, or {', '.join(others)} and {last}"
            raise CasemateError(stage, _flag(key), remedy)


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def _check_num_items(num_items: int | None) -> None:
    if num_items is not None and num_items < 1:
        raise CasemateError("--num-items", num_items, "must be at least 1")


def _prepared_folder(data: str, **of_sources: str | None) -> Folder | None:
    """The folder, if `data` is one; None for the name of a source."""
    folder = folder_at(data)
    if (folder / "dataset.json").is_file():
        for key, value in of_sources.items():
            if value is not None:
                raise CasemateError(_flag(key), value, "does not apply to a prepared dataset")
        return folder_at(absolute(folder))
    if is_uri(data) or Path(data).is_dir():
        remedy = "has no dataset.json; name a prepared dataset, or a source with --data-path"
        raise CasemateError("--data", data, remedy)
    return None


def _recipe_of(
    stage: str,
    model: str,
    source: Mapping[str, object],
    section: Mapping[str, Any],
    prepared: Folder | None,
    *,
    overrides: list[str],
    smoke: bool,
) -> "Recipe":
    """The recipe that the options describe: no training, a model folder, one section."""
    import yaml

    from components.models.checkpoint import read_header
    from components.models.spec import ModelSpec
    from pipelines.recipe import load as recipe

    folder = folder_at(absolute(folder_at(model)))
    spec = ModelSpec.from_dict(read_header(folder)["spec"], source=str(folder / "model.json"))
    values = {
        "name": f"{stage}-"
        + (re.sub(r"[^a-z0-9]+", "-", folder.name.lower()).strip("-") or "model"),
        "data": _data(source, spec, prepared),
        "model": {"pretrained": str(folder)},
        stage: dict(section),
    }
    loaded = recipe.loads(
        yaml.safe_dump(values), source=f"casemate {stage}", overrides=overrides, smoke=smoke
    )
    if prepared is None:  # fail before thousands of images are prepared
        from components.data.sources import open_source

        chosen = loaded.data
        opened = open_source(chosen.source, path=chosen.path, options=chosen.options)
        spec.check_classes(len(opened.classes))
    return loaded


def _data(
    source: Mapping[str, object], spec: "ModelSpec", prepared: Folder | None
) -> dict[str, object]:
    """The data section: a prepared folder must fit the model, a source is fitted to it."""
    if prepared is None:
        return {**source, "image_size": spec.image_size, "channels": spec.channels}
    from components.data.prepared import PreparedDataset

    dataset = PreparedDataset.open(prepared)
    spec.check_image((dataset.channels, dataset.height, dataset.width))
    spec.check_classes(len(dataset.classes))
    return {"source": "parquet", "path": str(prepared)}
