"""The gate's checks of the analyze section: studies that do not fit their networks or images."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from components.core.code_copies import look_in
from components.core.errors import CasemateError
from components.core.folders import Folder
from components.core.problems import Problems
from pipelines.recipe.facts import Facts, spec_of
from pipelines.recipe.schema.analyze import AnalyzeSection
from pipelines.recipe.schema.recipe import Recipe

if TYPE_CHECKING:
    from torch import nn

    from components.analyze.blocks import Blocks
    from components.models.known import Known

OF_BLOCKS = ("correlation", "lesions", "restricted_attention")  # studies of blocks
OTHER_MODELS = "analyze.other_models"
# Settings that may not fit a network; their defaults fit every network that has the study.
CHOICES = {
    "correlation": ("measure", "tokens"),
    "lesions": ("parts", "counts"),
    "restricted_attention": ("what", "distances", "depths"),
    "gaps": ("positions",),
}

KEYS = {("restricted_attention", "parts"): "what"}  # names of errors that differ from the recipe's


def check_images(recipe: Recipe, facts: Facts, problems: Problems) -> None:
    """Patches, ranks and judges that do not fit images and classes."""
    if recipe.analyze is None:
        return
    _check_folders(recipe, facts, problems)
    how = recipe.analyze.perturbations
    if not how:
        return
    key = "analyze.perturbations"
    if how.patch_size and facts.side and 2 * how.patch_size > facts.side:
        remedy = f"does not tile the images (side {facts.side}) at least twice"
        problems.add(f"{key}.patch_size", how.patch_size, remedy)
    judged = how.judges or how.judge_models
    if judged and facts.num_classes and how.top_k >= facts.num_classes:
        remedy = f"includes all {facts.num_classes} classes; write a smaller number"
        problems.add(f"{key}.top_k", how.top_k, remedy)


def _check_folders(recipe: Recipe, facts: Facts, problems: Problems) -> None:
    """Model folders whose names, classes or images do not fit."""
    for key, folder in analysis_paths(recipe):
        if key.rpartition(".")[2] in recipe.model_names():
            problems.add(key, "", "has the name of a model of this recipe; choose another")
        spec = spec_of(Path(folder).expanduser()) or {}
        classes, side = spec.get("num_classes"), spec.get("image_size")
        if classes and facts.num_classes and classes != facts.num_classes:
            remedy = f"has {classes} classes, the data have {facts.num_classes}"
            problems.add(key, folder, remedy)
        channels = spec.get("channels")
        widened = not key.startswith(OTHER_MODELS) and (facts.channels, channels) == (1, 3)
        if channels and facts.channels and channels != facts.channels and not widened:
            remedy = f"is for images of {channels} channels, the data have {facts.channels}"
            problems.add(key, folder, remedy)
        if key.startswith(OTHER_MODELS) and side and facts.side and side != facts.side:
            remedy = f"is for images of side {side}, the data have {facts.side}"
            problems.add(key, folder, remedy)


def certainly_works(section: AnalyzeSection, known: "Known | None") -> bool:
    """Whether all studies work, by what is known of a network without building it."""
    made = {study: how for study in CHOICES if (how := getattr(section, study))}
    if not made:
        return True
    if known is None or section.blocks.names is not None:
        return False
    has = {
        **dict.fromkeys(("correlation", "lesions"), known.has_blocks),
        "restricted_attention": known.drops_tokens,
        "gaps": known.scales_attention,
    }
    return all(
        has[study] and all(getattr(how, key) == getattr(type(how)(), key) for key in CHOICES[study])
        for study, how in made.items()
    )


def check_network(
    section: AnalyzeSection, network: "nn.Module", problems: Problems, *, seed: int
) -> None:
    """Studies that do not work for a network, by name."""
    from components.analyze.blocks import find_blocks  # imports torch

    if any(getattr(section, study) for study in OF_BLOCKS):
        try:
            blocks = find_blocks(network, section.blocks)
        except CasemateError as error:
            _add(problems, "", error)
        else:
            for study in OF_BLOCKS:
                _check_blocks(section, study, blocks, problems, seed=seed)
    if section.gaps:
        from components.analyze.gaps import module_names

        try:
            module_names(network, section.gaps)
        except CasemateError as error:
            _add(problems, "gaps", error)


def _check_blocks(
    section: AnalyzeSection, study: str, blocks: "Blocks", problems: Problems, *, seed: int
) -> None:
    from components.analyze.correlation import check_measure, chosen_streams
    from components.analyze.lesions import lesions_of
    from components.analyze.restricted import restrictions_of

    try:
        if study == "correlation" and section.correlation:
            chosen_streams(blocks, section.correlation)
            if section.blocks.names is None:
                check_measure(blocks, section.correlation)
        if study == "lesions" and section.lesions:
            lesions_of(blocks, section.lesions, seed=seed)
        if study == "restricted_attention" and section.restricted_attention:
            restrictions_of(blocks, section.restricted_attention, seed=seed)
    except CasemateError as error:
        _add(problems, study, error)


def _add(problems: Problems, study: str, error: CasemateError) -> None:
    """The error under the key of its study; one about the network itself names the study only."""
    key = error.key
    if key == "model.architecture":
        key = f"analyze.{study}" if study else "analyze"
    elif key.startswith("blocks."):
        key = f"analyze.{key}"
    else:
        key = f"analyze.{study}.{KEYS.get((study, key), key)}"
    problems.add(key, error.value, error.remedy)


def given_network(folder: Folder) -> "nn.Module | None":
    """The network of a given model, on the meta device if it can be; None if it is not here."""
    values = spec_of(folder)
    if values is None:
        return None
    from components.models.checkpoint import CODE, load_model
    from components.models.costs import network_of_spec
    from components.models.spec import ModelSpec

    spec = ModelSpec.from_dict(values, source=str(folder))
    look_in((folder / CODE).absolute())
    try:
        return network_of_spec(spec)
    except CasemateError:
        return None  # a user's network that is not here
    except RuntimeError:  # it computes while it is built, or cannot be moved
        return load_model(folder).net


def analysis_paths(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """(key, path) of the folders of further models and of judges."""
    section = recipe.analyze
    for name, folder in section.other_models.items() if section else ():
        yield f"{OTHER_MODELS}.{name}", folder
    how = section and section.perturbations
    for name, folder in how.judges.items() if how else ():
        yield f"analyze.perturbations.judges.{name}", folder
