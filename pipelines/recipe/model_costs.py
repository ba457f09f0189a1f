"""The models and test items of a recipe as estimates see them: shapes, and numbers of items."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.certify.estimate import device_bytes
from components.core.errors import CasemateError
from components.evaluate.settings import SubsetSettings
from components.models.spec import ABSENT_KEYS
from pipelines.recipe.costs import CostedNetwork, Question, known_splits, network_of
from pipelines.recipe.facts import given_spec, spec_of
from pipelines.recipe.schema.recipe import Recipe


def num_test_items(recipe: Recipe, subset: SubsetSettings, asked: Question, *, key: str) -> int:
    """Items of a subset; an error if the data must be read to know."""
    known = known_test_items(recipe, subset, asked)
    if known is None:
        raise CasemateError(
            f"{key}.subset.num_items", "", "is not known without the data; give --items N"
        )
    return known


def known_test_items(recipe: Recipe, subset: SubsetSettings, asked: Question) -> int | None:
    """Items of a subset, as far as it is known without the data."""
    chosen = len(subset.item_ids) if subset.item_ids else subset.num_items
    counts = (chosen, asked.num_items, known_splits(recipe, asked)["test"])
    return min((count for count in counts if count), default=None)


def model_cost(recipe: Recipe, name: str) -> CostedNetwork:
    """A model of the recipe: from its section, or from the folder of a given one."""
    if recipe.given_model():
        spec = given_spec(recipe)
        if spec is None:
            remedy = "is not on this machine: what it costs is unknown; estimate where it is"
            raise CasemateError("model.pretrained", recipe.model.pretrained, remedy)
        return _of_spec(spec)
    return network_of(recipe, name)


def folder_costs(key: str, folders: Mapping[str, str]) -> list[CostedNetwork]:
    """The models of these folders; `key` is the one that names them in a recipe."""
    found = []
    for name, folder in folders.items():
        spec = spec_of(Path(folder).expanduser())
        if spec is None:
            remedy = "is not on this machine: what it costs is unknown; estimate where it is"
            raise CasemateError(f"{key}.{name}", folder, remedy)
        found.append(_of_spec(spec))
    return found


def _of_spec(spec: Mapping[str, Any]) -> CostedNetwork:
    values = {**ABSENT_KEYS, **spec}
    return CostedNetwork.of(
        values["architecture"],
        side=values.get("upsample") or values["image_size"],
        channels=values["channels"],
        num_classes=values["num_classes"],
        options=values.get("options") or {},
    )


def pass_memory(model: CostedNetwork, micro_batch: int, dtype: str) -> int:
    """Bytes of a worker that passes so many images at once, at most."""
    return device_bytes(
        params=model.costs.params,
        activation_bytes=model.costs.activation_bytes,
        micro_batch=micro_batch,
        dtype=dtype,
    )
