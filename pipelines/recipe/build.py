"""Recipe sections to components: the one place where settings become arguments."""

from collections.abc import Mapping
from types import MappingProxyType

from components.core.errors import CasemateError
from components.core.folders import Folder, absolute, folder_at, within
from components.data.prepared import PreparedDataset
from components.denoising.settings import is_on_disk
from components.models.pretrained import check_compatible, read_parent
from components.models.settings import TIMM
from components.models.spec import ModelSpec
from components.train.objectives.make import trained_for
from pipelines.recipe import denoisers
from pipelines.recipe.load import with_values
from pipelines.recipe.schema.recipe import Recipe


def model_spec(recipe: Recipe, dataset: PreparedDataset, model: str) -> ModelSpec:
    """The spec of one of the recipe's models on a prepared dataset."""
    if dataset.height != dataset.width:
        raise CasemateError(
            "data.image_size",
            f"{dataset.height}x{dataset.width}",
            "is not square; set data.image_size",
        )
    section = recipe.model_of(model)
    for key, values in (("mean", section.mean), ("std", section.std)):
        if values is not None and len(values) != dataset.channels:
            raise CasemateError(
                f"model.{key}", values, f"needs {dataset.channels} entries, one per channel"
            )
    parent, usual = None, {"mean": (0.5,) * dataset.channels, "std": (0.5,) * dataset.channels}
    start = denoisers.start_of(recipe, model)
    architecture, options = denoisers.network_of(section)
    if start:
        denoisers.check_start("model.pretrained", start, channels=dataset.channels)
    elif section.pretrained:
        parent = read_parent(section.pretrained, architecture=section.architecture)
        usual = {"mean": parent.mean, "std": parent.std}
        if len(parent.mean) != dataset.channels:
            raise CasemateError(
                "data.channels",
                dataset.channels,
                f"do not suit {section.pretrained}: set data.channels: {len(parent.mean)}",
            )
    spec = ModelSpec(
        architecture=architecture,
        num_classes=len(dataset.classes),
        channels=dataset.channels,
        image_size=dataset.width,
        upsample=section.upsample,
        upsample_mode=section.upsample_mode,
        token_policy=section.token_policy,
        mean=tuple(section.mean or usual["mean"]),
        std=tuple(section.std or usual["std"]),
        options=options,
        trained_for=trained_for(recipe.objective_of(model), start=start),
    )
    if parent:
        check_compatible(spec, parent)
    return spec


def with_absolute_paths(
    recipe: Recipe, inputs: Mapping[str, Folder] = MappingProxyType({})
) -> Recipe:
    """The recipe with absolute paths, since workers start in other folders.

    Denoisers that the recipe trains are named by their folders, as far as `inputs` has them.
    """
    changes: dict[str, str] = {}
    for model in recipe.model_names() if recipe.train else []:
        key = recipe.objective_key(model)
        if behind := recipe.objective_of(model).denoiser_name:
            changes[f"{key}.objective.denoiser"] = denoisers.with_absolute_path(behind, inputs)
    for above, section in recipe.model_sections():
        if section.pretrained and is_on_disk(section.pretrained):
            changes[f"{above}model.pretrained"] = denoisers.with_absolute_path(
                section.pretrained, {}
            )
        elif section.pretrained not in (None, TIMM):
            changes[f"{above}model.pretrained"] = absolute(folder_at(section.pretrained))
    return with_values(recipe, changes) if changes else recipe


def model_folder(inputs: Mapping[str, Folder], model: str) -> Folder:
    """Where a model of the recipe is: trained by it, or given to it."""
    given = inputs.get(f"model.{model}")
    return given or within(inputs[f"train.{model}"], "model")
