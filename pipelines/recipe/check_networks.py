"""Checks of networks as shapes, a part of the gate; torch is imported only where it is needed."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from components.core.digests import canonical_json
from components.core.errors import CasemateError
from components.core.problems import Problems
from components.core.user_code import is_reference
from components.denoising.settings import ARCHITECTURES, is_on_disk
from components.models.known import Known, known_network, starts_from_timm
from components.models.settings import TIMM, ModelSettings
from pipelines.recipe import analysis
from pipelines.recipe.facts import Facts, is_here, spec_on
from pipelines.recipe.schema.recipe import MAIN, Recipe

if TYPE_CHECKING:
    from torch import nn

    from pipelines.recipe.denoisers import BehindDenoiser

ANY_IMAGES = Facts(height=32, width=32)  # a size that most networks accept, to inspect layers


def trained_sections(recipe: Recipe) -> list[tuple[str, ModelSettings]]:
    """The sections of networks that the recipe trains, by the prefix of their key `model`."""
    return recipe.model_sections() if recipe.train else []


def check_denoisers(recipe: Recipe, facts: Facts, problems: Problems) -> None:
    """Denoisers that do not fit their use in training or certification."""
    images = {"channels": facts.channels, "side": facts.side}
    for key, objective in recipe.objectives():
        if objective.denoiser_name and not _certainly_suits(recipe, objective, facts):
            from pipelines.recipe import denoisers

            with problems.at(""):
                denoisers.check_use(recipe, key, objective, **images)
    for name, section in recipe.certify.items():
        if section.denoiser_name and not _certainly_suits(recipe, section, facts):
            from pipelines.recipe import denoisers

            with problems.at(""):
                denoisers.check_certificate(recipe, f"certify.{name}", section, **images)
    for name in recipe.denoisers() if recipe.train else ():
        levels, most = (
            recipe.objective_of(name).certain_levels(),
            recipe.objective_of(name).max_sigma(),
        )
        if most and not (levels and most <= levels[1]):
            from pipelines.recipe import denoisers

            with problems.at(""):
                denoisers.check_training(recipe, f"{recipe.objective_key(name)}.objective", name)
    for key, start in denoisers_on_disk(recipe):
        if key.endswith(".pretrained") and is_here(start):
            from pipelines.recipe import denoisers

            with problems.at(""):
                denoisers.check_start(key, start, channels=facts.channels)


def _certainly_suits(recipe: Recipe, section: "BehindDenoiser", facts: Facts) -> bool:
    """Whether a denoiser is not on this machine, or is trained here and certainly fits."""
    name, sigma = section.denoiser_name, section.noise_sigma
    assert name is not None
    if is_on_disk(name):
        return not is_here(name)
    model = recipe.model_of(name)
    levels = recipe.objective_of(name).certain_levels()
    return (
        model.pretrained is None
        and "learn_variance" not in model.options
        and recipe.data.channels in (None, facts.channels)
        and levels is not None
        and sigma is not None
        and levels[0] <= sigma <= levels[1]
    )


def denoisers_on_disk(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Every folder of a denoiser that a recipe names, by its key."""
    for above, model in trained_sections(recipe):
        if model.pretrained and is_on_disk(model.pretrained):
            yield f"{above}model.pretrained", model.pretrained
    for key, objective in recipe.objectives():
        if objective.denoiser_name and is_on_disk(objective.denoiser_name):
            yield f"{key}.denoiser", objective.denoiser_name
    for name, section in recipe.certify.items():
        if section.denoiser_on_disk:
            yield f"certify.{name}.denoiser", section.denoiser_on_disk


def check_networks(recipe: Recipe, facts: Facts, problems: Problems) -> None:
    """Networks that cannot be built for these images, halve them or drop tokens."""
    if facts.side is None:
        return
    for above, section in trained_sections(recipe):
        drops = section.token_policy == "drop"
        own = is_reference(section.architecture)
        if not (drops or (section.options and not own) or section.architecture in ARCHITECTURES):
            continue
        known = _known(section, facts)
        if known is None or (drops and not known.drops_tokens):
            with problems.at(above.removesuffix(".")):
                _check_network(section, facts)


def check_recomputing(recipe: Recipe, facts: Facts, problems: Problems) -> None:
    """Networks without a switch for gradient checkpointing, if the recipe asks for it."""
    if facts.side is None or recipe.train is None or not recipe.train.recompute:
        return
    from components.train.passes import recompute_activations

    for _, section in trained_sections(recipe):
        with problems.at(""):
            recompute_activations(_network(section, facts))


def check_user_networks(recipe: Recipe, facts: Facts, problems: Problems) -> None:
    """Networks of the user's that do not work on these images."""
    if any(is_reference(section.architecture) for _, section in trained_sections(recipe)):
        from pipelines.recipe import user_code

        user_code.check_networks(recipe, facts, problems)


def _known(section: ModelSettings, facts: Facts) -> Known | None:
    """Properties of a section's network that are known without building it."""
    side = section.upsample or facts.side
    if side is None or (section.pretrained and section.architecture in ARCHITECTURES):
        return None  # options may be those of the weights
    return known_network(section.architecture, section.options, image_size=side)


def _check_network(section: ModelSettings, facts: Facts) -> None:
    from components.models.tokens import check_droppable
    from pipelines.recipe import denoisers

    assert facts.side is not None
    start = section.pretrained if section.architecture in ARCHITECTURES else None
    if start and not is_here(start):
        return
    if start and not section.options:
        with denoisers.by_key("model.pretrained", start):
            network = _network(section, facts)
        denoisers.check_side("model.pretrained", start, network, side=facts.side)
    else:
        network = _network(section, facts)
        denoisers.check_side("model.options", section.options, network, side=facts.side)
    if section.token_policy == "drop":
        check_droppable(network)


def has_droppable_tokens(section: ModelSettings, facts: Facts) -> bool:
    """Whether a network can drop tokens; mostly plain vision transformers can."""
    seen = facts.updated(None if facts.side else ANY_IMAGES)
    if known := _known(section, seen):
        return known.drops_tokens
    from components.models.tokens import check_droppable

    try:
        check_droppable(_network(section, seen))
    except CasemateError:
        return False
    return True


def _network(model: ModelSettings, facts: Facts) -> "nn.Module":
    """The network of a section on the meta device, to inspect its layers; user code as it is."""
    assert facts.side is not None
    if is_reference(model.architecture):
        from pipelines.recipe.user_code import Trial

        return Trial.of(model, facts).network()
    from pipelines.recipe import denoisers

    architecture, options = denoisers.network_of(model)
    channels = facts.channels or 3  # any number works here
    return _shapes(architecture, canonical_json(options), channels, model.upsample or facts.side)


@cache  # trials of a search differ in other keys, mostly
def _shapes(architecture: str, options: str, channels: int, side: int) -> "nn.Module":
    from components.models.costs import network_of_shapes

    return network_of_shapes(
        architecture,
        image_size=side,
        channels=channels,
        num_classes=2,
        options=json.loads(options),
    )


def check_attention(recipe: Recipe, facts: Facts, problems: Problems) -> None:
    """Networks without accessible attention whose attention the recipe scales."""
    if facts.side is None:
        return
    for key, model in _scaled_models(recipe):
        section = recipe.model_of(model)
        known = _known(section, facts)
        if known and known.scales_attention:
            continue
        from components.models.attention.discover import attention_of

        try:
            attention_of(_network(section, facts))
        except CasemateError as error:
            problems.add(key, section.architecture, error.remedy)


def check_studies(recipe: Recipe, facts: Facts, problems: Problems) -> None:
    """Networks that a study of the analyze section does not work for."""
    if recipe.analyze is None or facts.side is None:
        return
    for name in recipe.analyzed_models():
        if folder := recipe.given_model():
            if (network := analysis.given_network(folder)) is None:
                continue  # on another machine
        elif recipe.denoiser_of(name):
            continue
        else:
            section = recipe.model_of(name)
            if analysis.certainly_works(recipe.analyze, _known(section, facts)):
                continue
            network = _network(section, facts)
        analysis.check_network(recipe.analyze, network, problems, seed=recipe.seed)
    for place in recipe.analyze.other_models.values():
        if network := analysis.given_network(Path(place).expanduser()):
            analysis.check_network(recipe.analyze, network, problems, seed=recipe.seed)


def _scaled_models(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """(key, model) of every place where a recipe scales the attention of a trained model."""
    if recipe.train is None:
        return
    for name in recipe.model_names():
        if recipe.objective_of(name).scales_attention:
            yield f"{recipe.objective_key(name)}.objective.aas", name
    for name, section in recipe.attack.items():
        for number, entry in enumerate(section.attacks):
            if entry.scaling:
                yield from ((f"attack.{name}.attacks.{number}", model) for model in section.models)


def check_starting_weights(recipe: Recipe, facts: Facts, problems: Problems) -> None:
    """Initial weights of another network or for other images."""
    if None in (facts.side, facts.channels, facts.num_classes) or recipe.train is None:
        return
    for name in recipe.model_names():
        start = recipe.model_of(name).pretrained
        if start is None or is_on_disk(start) or _certainly_starts(recipe, name, facts):
            continue  # random weights, and denoisers, which are checked above
        if start == TIMM or Path(start).expanduser().is_dir():
            from pipelines.recipe import build

            with problems.at("" if name == MAIN else f"train.variants.{name}"):
                build.model_spec(recipe, _as_prepared(facts), name)


def _certainly_starts(recipe: Recipe, name: str, facts: Facts) -> bool:
    """Whether timm certainly has weights for this model and these images."""
    section, behind = recipe.model_of(name), recipe.objective_of(name).denoiser_name
    return (
        section.pretrained == TIMM
        and starts_from_timm(section.architecture, section.options)
        and (section.mean, section.std, behind) == (None, None, None)
        and facts.channels == 3
        and facts.height == facts.width
    )


def _as_prepared(facts: Facts) -> Any:
    """The facts of a prepared dataset that the spec of a model needs."""
    return SimpleNamespace(
        height=facts.height,
        width=facts.width,
        channels=facts.channels,
        classes=range(facts.num_classes or 0),
    )


def check_sharding(recipe: Recipe, facts: Facts, problems: Problems) -> None:
    """Networks and objectives that fsdp cannot train."""
    if recipe.train is None or recipe.cluster.strategy != "fsdp" or facts.side is None:
        return
    import torch

    from components.models.pixels import PixelModel
    from components.train.objectives.make import make_objective
    from components.train.sharding import check_shardable

    for name in recipe.model_names():
        if name in recipe.denoisers() or recipe.denoiser_of(name):
            continue  # their folders may not exist yet
        try:
            with torch.device("meta"):  # layers are inspected, not weights
                network = PixelModel(spec_on(recipe.model_of(name), facts))
        except RuntimeError:
            continue  # computes with values while it is built
        with problems.at(""):
            objective = make_objective(
                recipe.objective_of(name), label_smoothing=recipe.train.label_smoothing
            )
            check_shardable(network, objective)
