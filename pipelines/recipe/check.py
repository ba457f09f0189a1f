"""Mistakes that would otherwise only show in workers, found before the first one starts.

Some a recipe shows alone, others need the side of its images: as it is written, as its source is
known for, or as prepared.
"""

import re
from collections.abc import Iterator

from torch import nn

from components.attacks.settings import AasSettings
from components.certify.l2.settings import GaussianSettings
from components.certify.patch.settings import AblationSettings, DoubleMaskingSettings, PatchSettings
from components.core.errors import CasemateError
from components.data.settings import DataSettings
from components.data.sources import find_source
from components.denoising.loading import describe_source
from components.denoising.settings import ARCHITECTURES, is_on_disk
from components.models.settings import ModelSettings
from components.models.zoo import check_known
from components.train.objectives.settings import (
    AblationTrainingSettings,
    AdversarialSettings,
    ColumnsTrainingSettings,
    DenoisedTrainingSettings,
    ObjectiveSettings,
)
from components.train.schedules import peak_rate
from components.train.settings import TrainSettings
from pipelines.recipe import build, denoisers
from pipelines.recipe.schema.recipe import MAIN, Recipe


def check_recipe(recipe: Recipe) -> None:
    """Refuse what a recipe alone shows to be impossible."""
    if recipe.train:
        for model in recipe.model_names():
            check_known(recipe.model_of(model).architecture)
        _check_floor(recipe.train)
        _check_bands(recipe)
        build.augmentation(recipe.train.augment, size=recipe.data.image_size or 1)
        share, rest = divmod(recipe.train.batch_size, recipe.cluster.train_workers)
        if build.mixing(recipe.train.augment) and share % 2 and not rest:
            remedy = f"leaves a worker {share} images; mixing needs pairs"
            raise CasemateError("train.batch_size", recipe.train.batch_size, remedy)
    if side := known_side(recipe.data):
        check_on_images(recipe, side=side)
    else:
        _check_denoisers(recipe, channels=known_channels(recipe.data), side=None)


def _check_floor(train: TrainSettings) -> None:
    """Refuse a cosine that would rise to its floor."""
    floor = getattr(train.schedule, "floor", None) or 0.0
    peak = peak_rate(train.learning_rate, batch_size=train.batch_size, rule=train.rate_rule)
    if floor > peak:
        remedy = f"is above the learning rate, which comes to {peak:g}: it would rise to it"
        raise CasemateError("train.schedule.floor", floor, remedy)


def trained_ablation(objective: ObjectiveSettings) -> tuple[str, int] | None:
    """The kind of certificate and the visible side that a model is trained for, if it is."""
    if isinstance(objective, ColumnsTrainingSettings):
        return "columns", objective.band
    if isinstance(objective, AblationTrainingSettings):
        return f"{objective.shape}s", objective.size
    return None


def _check_bands(recipe: Recipe) -> None:
    """Refuse certificates that leave their band to a model that was not trained on any."""
    for name, entry in recipe.certificates().items():
        section = entry.section
        if not isinstance(section, AblationSettings) or section.band:
            continue
        shape, _ = trained_ablation(recipe.objective_of(section.model)) or (None, None)
        if shape != section.kind:
            remedy = f"is needed: model {section.model} was not trained on {section.kind}"
            raise CasemateError(f"certify.{name}.band", None, remedy)


def known_side(data: DataSettings) -> int | None:
    """The side of images as written, or of a source whose images all are squares of one size."""
    if data.image_size:
        return data.image_size
    square = re.match(r"(\d+)x\1\b", find_source(data.source).image_size)
    return int(square[1]) if square else None


def known_channels(data: DataSettings) -> int | None:
    """The channels of images as written, or of a source that is known for grey or colour."""
    if data.channels:
        return data.channels
    shape = find_source(data.source).image_size
    return 1 if "grey" in shape else 3 if re.fullmatch(r"\d+x\d+", shape) else None


def check_on_images(recipe: Recipe, *, side: int, channels: int | None = None) -> None:
    """Refuse what does not fit images of this side, or networks that look at them.

    `channels` are those of the images, where they are known: a recipe may leave them to its source.
    """
    channels = channels or known_channels(recipe.data)
    _check_denoisers(recipe, channels=channels, side=side)
    for key, pixels in _lengths(recipe):
        if pixels > side:
            raise CasemateError(key, pixels, f"is larger than the image ({side})")
    asked = channels or 3  # any number will do to ask
    for above, section in _trained_networks(recipe):
        try:
            _check_network(section, channels=asked, side=side)
        except CasemateError as error:
            raise CasemateError(f"{above}{error.key}", error.value, error.remedy) from error
    for key, model in _scaled_models(recipe):
        _check_attention(key, recipe.model_of(model), asked, side)


def _check_denoisers(recipe: Recipe, *, channels: int | None, side: int | None) -> None:
    """Refuse denoisers that do not suit those who are trained or certified behind them."""
    for key, objective in _objectives(recipe):
        if isinstance(objective, DenoisedTrainingSettings):
            denoisers.check_use(recipe, key, objective, channels=channels, side=side)
    denoisers.check_certificates(recipe, channels=channels, side=side)
    for key, source in denoisers_on_disk(recipe):
        if key.endswith(".pretrained") and denoisers.is_here(source):
            with denoisers.by_key(key, source):
                found = describe_source(source)
            denoisers.check_channels(key, found.channels, channels)


def denoisers_on_disk(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Every folder of a denoiser that a recipe names, by its key."""
    for above, model in _model_sections(recipe):
        if model.pretrained and is_on_disk(model.pretrained):
            yield f"{above}model.pretrained", model.pretrained
    named = [*_objectives(recipe), *((f"certify.{n}", c) for n, c in recipe.certify.items())]
    for key, section in named:
        if isinstance(section, DenoisedTrainingSettings | GaussianSettings):
            name = section.denoiser
            if name and is_on_disk(name):
                yield f"{key}.denoiser", name


def _lengths(recipe: Recipe) -> Iterator[tuple[str, int]]:
    """Every length inside images that a recipe names, by its key."""
    for key, objective in _objectives(recipe):
        if isinstance(objective, ColumnsTrainingSettings):
            yield f"{key}.band", objective.band
        if isinstance(objective, AblationTrainingSettings):
            yield f"{key}.size", objective.size
    for name, section in recipe.certify.items():
        key = f"certify.{name}"
        if isinstance(section, PatchSettings):
            yield f"{key}.patch_sizes", max(section.patch_sizes)
        if isinstance(section, AblationSettings):
            yield f"{key}.band", section.band or 0  # None: as trained, which is asked above
            yield f"{key}.stride", section.stride
            if section.sweep:
                yield f"{key}.sweep.band", max(section.sweep.band, default=0)
                yield f"{key}.sweep.stride", max(section.sweep.stride, default=0)
        if isinstance(section, DoubleMaskingSettings):
            yield f"{key}.mask_patch", section.mask_patch


def _scaled_models(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Where a recipe scales attention, and of which of the models that it trains."""
    for (key, objective), model in zip(_objectives(recipe), recipe.model_names(), strict=False):
        if isinstance(objective, AdversarialSettings) and objective.aas:
            yield f"{key}.aas", model
    for name, section in recipe.attack.items() if recipe.train else ():
        for number, entry in enumerate(section.attacks):
            if isinstance(entry, AasSettings):
                yield from ((f"attack.{name}.attacks.{number}", model) for model in section.models)


def _objectives(recipe: Recipe) -> list[tuple[str, ObjectiveSettings]]:
    """The objectives of all models, in the order of their names."""
    names = recipe.model_names() if recipe.train else []
    keys = ["train" if name == MAIN else f"train.variants.{name}" for name in names]
    found = [recipe.objective_of(name) for name in names]
    return [(f"{key}.objective", own) for key, own in zip(keys, found, strict=True)]


def _trained_networks(recipe: Recipe) -> Iterator[tuple[str, ModelSettings]]:
    """Sections whose network may not suit the images: with options, or of a denoiser."""
    for above, section in _model_sections(recipe):
        if section.options or section.architecture in ARCHITECTURES:
            yield above, section


def _model_sections(recipe: Recipe) -> list[tuple[str, ModelSettings]]:
    """What stands above each `model` section of networks that are trained, and the section."""
    if recipe.train is None:
        return []
    variants = recipe.train.variants.items()
    own = [(f"train.variants.{name}.", part.model) for name, part in variants if part.model]
    return [("", recipe.model), *own]


def _check_network(section: ModelSettings, *, channels: int, side: int) -> None:
    """Refuse a network that cannot be built for these images, or that cannot halve them."""
    start = section.pretrained if section.architecture in ARCHITECTURES else None
    if start and not denoisers.is_here(start):
        return
    if start and not section.options:
        with denoisers.by_key("model.pretrained", start):
            network = _network(section, channels, side)
        denoisers.check_side("model.pretrained", start, network, side=side)
    else:
        network = _network(section, channels, side)
        denoisers.check_side("model.options", section.options, network, side=side)


def _network(model: ModelSettings, channels: int, side: int) -> nn.Module:
    """The network of a section, without values: to be asked what it is."""
    from components.models.costs import network_of_shapes

    architecture, options = denoisers.network_of(model)
    return network_of_shapes(
        architecture,
        image_size=model.upsample or side,
        channels=channels,
        num_classes=2,
        options=options,
    )


def _check_attention(key: str, model: ModelSettings, channels: int, side: int) -> None:
    from components.models.attention.discover import attention_of

    net = _network(model, channels, side)
    try:
        attention_of(net)
    except CasemateError as error:
        raise CasemateError(key, model.architecture, error.remedy) from error
