"""Commands that take a recipe, or any model and any data: these describe a recipe."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.core.errors import CasemateError
from components.core.folders import Folder, absolute, folder_at
from components.core.object_stores import is_uri
from components.core.problems import RecipeError
from components.core.settings import Problem
from components.models.places.registry import ModelFacts, find_place
from pipelines.api import load_recipe
from pipelines.api.given_models import GivenModel, given_model
from pipelines.cli.flow import reading, run_and_show
from pipelines.cli.given_data import SIZES, sizes_of
from pipelines.cli.options import (
    AddressOpt,
    ChannelsOpt,
    Command,
    DataOpt,
    DataPathOpt,
    FitOpt,
    ForceOpt,
    ImageSizeOpt,
    JsonOpt,
    MeanOpt,
    ModelOpt,
    NoRecipeArg,
    NumClassesOpt,
    SetOpt,
    SmokeOpt,
    StdOpt,
    StorageOpt,
    WeightsOpt,
    flag,
    numbers,
    with_parameters,
)

if TYPE_CHECKING:
    from components.models.spec import ModelSpec
    from pipelines.recipe.schema.recipe import Recipe

Section = dict[str, Any]  # of the recipe
OPTIONS = {  # by the key that they set
    "data.source": "--data",
    "data.path": "--data-path",
    "data.fit": "--fit",
    "data.image_size": "--image-size",
    "data.channels": "--channels",
    "model.pretrained": "--model",
}
LISTS = {"evaluate": "--suite", "analyze": "--study"}  # options that list parts of the section


def model_command(
    stage: str, section_of: Callable[..., Section], *, required: Sequence[str] = ()
) -> Command:
    """The command of a stage, with the options of `section_of` after those of model and data.

    `section_of(overrides, **options)` returns the section of the stage. Without a recipe, the
    options `required` are needed beside model and data.
    """

    def command(
        recipe: NoRecipeArg = None,
        model: ModelOpt = None,
        weights: WeightsOpt = None,
        image_size: ImageSizeOpt = None,
        channels: ChannelsOpt = None,
        num_classes: NumClassesOpt = None,
        mean: MeanOpt = None,
        std: StdOpt = None,
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
        from pipelines.runtime.progress import busy

        overrides = set_ or []
        where: dict[str, Any] = {
            "storage": storage,
            "force": force,
            "address": address,
            "as_json": as_json,
        }
        facts = {
            "weights": weights, "image_size": image_size, "channels": channels,
            "num_classes": num_classes, "mean": mean, "std": std,
        }  # fmt: skip
        given = {"model": model, "data": data, "data_path": data_path, "fit": fit, **facts, **own}
        needed = {key: given[key] for key in ("model", "data", *required)}
        if recipe is not None:
            _refuse_beside_recipe({**needed, **given})
            with reading(recipe):
                loaded = load_recipe(recipe, overrides=overrides, smoke=smoke)
            run_and_show(loaded, until=stage, **where)
            return
        _check_needed(stage, needed)
        _check_num_items(own["num_items"])
        assert model is not None
        assert data is not None
        prepared = _prepared_folder(data, data_path=data_path, fit=fit)
        source = {"source": data, "path": data_path, "fit": fit or "pad"}
        section = section_of(overrides, **own)
        with (
            busy(f"{model}: loading the model"),
            _options_named(stage, {*given}, overrides, data_is_folder=prepared is not None),
            _opened(model, facts, source, prepared, overrides) as opened,
        ):
            loaded = _recipe_of(
                stage, opened, source, section, prepared,
                storage=storage, overrides=overrides, smoke=smoke,
            )  # fmt: skip
        run_and_show(loaded, prepared=prepared, **where)

    parameters = signature(command).parameters.values()
    shared = [p for p in parameters if p.kind is not Parameter.VAR_KEYWORD]
    place = [p.name for p in shared].index("set_")
    _, *own_options = signature(section_of).parameters.values()
    return with_parameters(command, [*shared[:place], *own_options, *shared[place:]])


def _refuse_beside_recipe(options: Mapping[str, object]) -> None:
    """Refuse options that the recipe sets itself."""
    for key, value in options.items():
        if value is not None:
            raise CasemateError(flag(key), value, "cannot be combined with RECIPE, which sets it")


def _check_needed(stage: str, options: Mapping[str, object]) -> None:
    *others, last = map(flag, options)
    for key, value in options.items():
        if value is None:
            remedy = f"is missing; name a RECIPE, or {', '.join(others)} and {last}"
            raise CasemateError(stage, flag(key), remedy)


def _check_num_items(num_items: int | None) -> None:
    if num_items is not None and num_items < 1:
        raise CasemateError("--num-items", num_items, "must be at least 1")


def _prepared_folder(data: str, **of_sources: str | None) -> Folder | None:
    """The folder, if `data` is one; None for the name of a source."""
    folder = folder_at(data)
    if (folder / "dataset.json").is_file():
        for key, value in of_sources.items():
            if value is not None:
                raise CasemateError(flag(key), value, "does not apply to a prepared dataset")
        return folder_at(absolute(folder))
    if is_uri(data) or Path(data).is_dir():
        remedy = "has no dataset.json; name a prepared dataset, or a source with --data-path"
        raise CasemateError("--data", data, remedy)
    return None


@contextmanager
def _opened(
    model: str,
    facts: Mapping[str, Any],
    source: Mapping[str, Any],
    prepared: Folder | None,
    overrides: Sequence[str],
) -> Iterator[GivenModel]:
    """The model; what neither it nor the user says about its images follows from the data."""
    given = {**facts, **{key: numbers(flag(key), facts[key]) for key in ("mean", "std")}}
    with ExitStack() as stack:
        try:
            opened = stack.enter_context(
                given_model(
                    model,
                    ModelFacts(**given),
                    sizes_of(
                        source, prepared, overrides=overrides, wanted=_unsaid_sizes(model, given)
                    ),
                )
            )
        except CasemateError as error:
            key = "model" if error.key == "storage" else error.key  # of the URI of a folder
            if key not in (*facts, "model"):
                raise
            raise CasemateError(flag(key), error.value, error.remedy) from error
        yield opened


def _unsaid_sizes(model: str, given: Mapping[str, Any]) -> list[str]:
    """Sizes that neither the user nor the model's place says: they follow from the data."""
    place, name = find_place(model)
    if place.kind == "file":
        from components.models.places.files import kind_of_file

        if kind_of_file(Path(name)) == "pt2":
            return []
    return [key for key in SIZES if key in place.takes and given[key] is None]


@contextmanager
def _options_named(
    stage: str, options: Collection[str], overrides: Sequence[str], *, data_is_folder: bool
) -> Iterator[None]:
    """Errors about keys of the recipe that is made here name the option that set the key."""
    typed = [override.partition("=")[0].strip() for override in overrides]
    named = {**OPTIONS, "data.path": "--data"} if data_is_folder else OPTIONS

    def option(key: str) -> str:
        if any(key == own or key.startswith(f"{own}.") for own in typed):
            return key  # of --set
        section, *inner = key.split(".")
        words = [word for word in inner if not word.isdigit()]  # places in lists
        if section == stage and words:
            if words[-1] in options:
                return flag(words[-1])
            return LISTS.get(stage, key) if len(words) == 1 else key
        return named.get(key, key)

    try:
        yield
    except RecipeError as error:
        found = [_with_set(p._replace(field=option(p.field))) for p in error.problems]
        if len(found) == 1 and found[0].field.startswith("--"):
            raise CasemateError(*found[0]) from error
        raise RecipeError("options", found) from error
    except CasemateError as error:
        raise CasemateError(option(error.key), error.value, error.remedy) from error


def _with_set(problem: Problem) -> Problem:
    """A key that is missing and has no option is written by --set."""
    remedy = problem.remedy.replace("write it", f"write it: --set {problem.field}=VALUE")
    return problem if problem.field.startswith("--") else problem._replace(remedy=remedy)


def _recipe_of(
    stage: str,
    model: GivenModel,
    source: Mapping[str, object],
    section: Mapping[str, Any],
    prepared: Folder | None,
    *,
    storage: str | None,
    overrides: list[str],
    smoke: bool,
) -> "Recipe":
    """The recipe that the options describe: no training, a given model, one section.

    A model that is not a folder yet is stored after all that could be wrong with the recipe.
    """
    import yaml

    from pipelines.recipe import load as recipe

    def read(place: str) -> "Recipe":
        values = {
            "name": f"{stage}-" + (_plain_name(model.label) or "model"),
            "data": _data(source, model.spec, prepared),
            "model": {"pretrained": place},
            stage: dict(section),
        }
        text, named = yaml.safe_dump(values), f"casemate {stage}"
        return recipe.loads(text, source=named, overrides=overrides, smoke=smoke)

    loaded = read(str(model.folder))
    if prepared is None:  # fail before thousands of images are prepared
        from components.data.sources import open_source

        chosen = loaded.data
        opened = open_source(chosen.source, path=chosen.path, options=chosen.options)
        model.spec.check_classes(len(opened.classes))
    _check(loaded, prepared)
    if not model.is_new:
        return loaded
    root = storage or loaded.storage.root
    return read(model.stored(storage=root, recipe=loaded.name))


def _check(recipe: "Recipe", prepared: Folder | None) -> None:
    """The gate of every flow, before anything is written."""
    from components.data.prepared import PreparedDataset
    from pipelines.recipe.check import check, check_on_images

    if prepared is None:
        check(recipe)
    else:
        check_on_images(recipe, PreparedDataset.open(prepared))


def _plain_name(label: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")


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
