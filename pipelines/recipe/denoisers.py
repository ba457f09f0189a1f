"""Denoisers of a recipe: noise levels, folders, and their records in models."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

from torch import nn

from components.certify.settings import CertificateSettings
from components.core.errors import CasemateError
from components.core.folders import Folder, absolute, folder_at, within
from components.denoising import pretrained
from components.denoising.diffusion import Diffusion
from components.denoising.loading import (
    Description,
    describe_source,
    source_of,
)
from components.denoising.samplers import check_variance
from components.denoising.settings import is_on_disk
from components.models.settings import ModelSettings
from components.train.objectives.denoiser import diffusion_of
from components.train.objectives.settings import DenoiserTrainingSettings
from pipelines.recipe.facts import is_here
from pipelines.recipe.schema.recipe import Recipe


def start_of(recipe: Recipe, name: str) -> str | None:
    """The weights on disk from which a denoiser of the recipe is trained."""
    start = recipe.model_of(name).pretrained
    return start if start and is_on_disk(start) else None


def network_of(section: ModelSettings) -> tuple[str, Mapping[str, Any]]:
    """Architecture and options of a denoiser; without options, those of its weights on disk."""
    if section.pretrained and is_on_disk(section.pretrained) and not section.options:
        return pretrained.network_of(section.pretrained)
    return section.architecture, section.options


def with_absolute_path(name: str, inputs: Mapping[str, Folder]) -> str:
    """A denoiser by the absolute path of its folder, if it is on disk or among the inputs."""
    if is_on_disk(name):
        kind, _, path = name.partition(":")
        return f"{kind}:{absolute(folder_at(path))}"
    trained = inputs.get(f"train.{name}")
    return f"model:{absolute(within(trained, 'model'))}" if trained else name


def of_certificate(section: CertificateSettings, part: str, inputs: Mapping[str, Folder]) -> str:
    """The source of the denoiser in front of a certified model, from the folders of its inputs."""
    assert section.denoiser_name is not None
    if section.denoiser_on_disk:
        return source_of(inputs[f"denoiser.{part}"])
    return with_absolute_path(section.denoiser_name, inputs)


def folder_behind(recipe: Recipe, name: str) -> str | None:
    """The folder that describes a denoiser: its own, or that of its initial weights."""
    return name if is_on_disk(name) else start_of(recipe, name)


def describe(recipe: Recipe, name: str) -> Description | None:
    """A denoiser before it is loaded or trained; None if it needs a folder that is not here."""
    source = folder_behind(recipe, name)
    if source and not is_here(source):
        return None
    if is_on_disk(name):
        return describe_source(name)
    objective = recipe.objective_of(name)
    assert isinstance(objective, DenoiserTrainingSettings)
    channels = recipe.data.channels or 0  # 0: known from the data; the denoiser has as many
    start, (architecture, options) = start_of(recipe, name), network_of(recipe.model_of(name))
    return Description(diffusion_of(objective, start), channels, architecture, options)


class BehindDenoiser(Protocol):
    """A section that trains or certifies behind a denoiser."""

    @property
    def denoiser_name(self) -> str | None: ...
    @property
    def noise_sigma(self) -> float | None: ...


def check_certificate(
    recipe: Recipe,
    key: str,
    section: CertificateSettings,
    *,
    channels: int | None,
    side: int | None,
) -> Description | None:
    """Refuse a denoiser that does not fit the certificate at `key`, before any training."""
    found = check_use(recipe, key, section, channels=channels, side=side)
    if found and section.denoising_sampler and section.denoising_sampler.puts_noise_back:
        _check_ancestral(f"{key}.sampler", section.denoiser_name or "", found)
    return found


def check_use(
    recipe: Recipe,
    key: str,
    section: BehindDenoiser,
    *,
    channels: int | None,
    side: int | None,
) -> Description | None:
    """Refuse noise and images that a section's denoiser does not support, if it can be described.

    The image side of networks that the recipe trains is checked with those networks.
    """
    name, sigma = section.denoiser_name, section.noise_sigma
    assert name is not None
    assert sigma is not None
    on_disk = is_on_disk(name)
    with by_key(f"{key}.denoiser", name) if on_disk else nullcontext():
        found = describe(recipe, name)
    if found is None:
        return None
    check_sigma(f"{key}.sigma", sigma, found.diffusion)
    check_channels(f"{key}.denoiser", found.channels, channels)
    if side and on_disk:
        with by_key(f"{key}.denoiser", name):
            network = found.network(image_size=side, channels=found.channels)
        check_side(f"{key}.denoiser", name, network, side=side)
    return found


def check_training(recipe: Recipe, key: str, name: str) -> None:
    """Refuse to train a denoiser on noise beyond the last level of its schedule."""
    objective, found = recipe.objective_of(name), describe(recipe, name)
    if found and objective.max_sigma() > found.diffusion.schedule.sigmas[-1]:
        check_sigma(key, objective.max_sigma(), found.diffusion)


@contextmanager
def by_key(key: str, source: str) -> Iterator[None]:
    """Report mistakes in a folder under the key of the recipe that names it."""
    try:
        yield
    except CasemateError as error:
        raise CasemateError(key, source, f"cannot be used: {error}") from error


def check_side(key: str, value: object, network: nn.Module, *, side: int) -> None:
    """Refuse an image side that is not a multiple of the network's stride."""
    stride = getattr(network, "stride", 1)
    if side % stride:
        remedy = f"needs image sides that are multiples of {stride}; these are {side}"
        raise CasemateError(key, value, remedy)


def _check_ancestral(key: str, name: str, found: Description) -> None:
    """Reject ancestral sampling when the variance is unknown."""
    try:
        check_variance(found.diffusion.variance, predicted=found.predicts_variance)
    except CasemateError as error:
        remedy = f"does not fit {name}: variance_type {error.value} {error.remedy}"
        raise CasemateError(key, "ancestral", remedy) from error


def check_sigma(key: str, sigma: float, known: Diffusion) -> None:
    """Refuse noise outside the levels of a schedule; errors name `key`."""
    try:
        known.schedule.check(sigma)
    except CasemateError as error:
        raise CasemateError(key, error.value, error.remedy) from None


def check_start(key: str, start: str, *, channels: int | None) -> None:
    """Refuse initial weights whose channels do not match the data."""
    with by_key(key, start):
        found = describe_source(start)
    check_channels(key, found.channels, channels)


def check_channels(key: str, channels: int, wanted: int | None) -> None:
    """Refuse a denoiser whose channels do not match the images."""
    if channels and wanted and channels != wanted:
        remedy = f"input channels do not match the images, which have {wanted}"
        raise CasemateError(key, channels, remedy)
