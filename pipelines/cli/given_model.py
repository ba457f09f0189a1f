"""A model folder on any data, without a recipe: the recipe that such options describe."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.core.errors import CasemateError

if TYPE_CHECKING:
    from components.models.spec import ModelSpec
    from pipelines.recipe.schema.recipe import Recipe


def refuse_beside_recipe(options: Mapping[str, object]) -> None:
    """Refuse options that the recipe sets itself."""
    for key, value in options.items():
        if value is not None:
            raise CasemateError(key, value, "cannot be combined with RECIPE, which sets it")


def check_num_items(num_items: int | None) -> None:
    if num_items is not None and num_items < 1:
        raise CasemateError("--num-items", num_items, "must be at least 1")


def prepared_folder(data: str, **of_sources: str | None) -> Path | None:
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


def recipe_of(
    command: str,
    model: Path,
    source: Mapping[str, object],
    section: Mapping[str, Any],
    prepared: Path | None,
    *,
    overrides: list[str],
    smoke: bool,
) -> "Recipe":
    """The recipe that the options describe: no training, a model folder, one section."""
    import yaml

    from components.models.checkpoint import read_header
    from components.models.spec import ModelSpec
    from pipelines.recipe import load as recipe

    folder = model.expanduser().absolute()
    spec = ModelSpec.from_dict(read_header(folder)["spec"], source=str(folder / "model.json"))
    values = {
        "name": f"{command}-"
        + (re.sub(r"[^a-z0-9]+", "-", model.name.lower()).strip("-") or "model"),
        "data": _data(source, spec, prepared),
        "model": {"pretrained": str(folder)},
        command: dict(section),
    }
    loaded = recipe.loads(
        yaml.safe_dump(values), source=f"casemate {command}", overrides=overrides, smoke=smoke
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
