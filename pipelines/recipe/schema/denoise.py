"""Denoisers: how they are trained, and classifiers that are tuned behind one."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from pipelines.recipe.schema.base import Count, Pixels, PositivePixels, Section

ARCHITECTURES = ("tiny_unet", "unet")  # networks that estimate images; all others tell classes
SOURCES = ("diffusers:", "model:")  # of denoisers on disk; other names are models of the recipe


def _known_source(text: str) -> str:
    if ":" in text and not text.startswith(SOURCES):
        raise PydanticCustomError(
            "denoiser", "is neither a model of train.variants nor diffusers:PATH or model:PATH"
        )
    return text


DenoiserName = Annotated[str, Field(min_length=1), AfterValidator(_known_source)]


class DenoiserObjective(Section):
    """Noise prediction at the levels that certification will meet (Carlini et al. 2023, 5.2)."""

    kind: Literal["denoiser"]
    sigmas: list[PositivePixels] = []
    range: tuple[Pixels, Pixels] | None = None
    full: bool = False  # the whole schedule, as for a model that draws images
    schedule: Literal["cosine", "linear", "pretrained"] = "cosine"  # last: of model.pretrained
    num_timesteps: Annotated[int, Field(ge=10)] = 4000  # left out beside `pretrained`
    sampling: Literal["sigma", "timestep"] = "sigma"  # what is uniform on a range

    @model_validator(mode="after")
    def _one_set_of_levels(self) -> Self:
        if bool(self.sigmas) + (self.range is not None) + self.full != 1:
            raise PydanticCustomError(
                "train", "objective: give one of sigmas: [0.25], range: [0, 1.0] and full: true"
            )
        if self.range is not None and self.range[0] >= self.range[1]:
            raise PydanticCustomError("train", "objective: range: must rise, e.g. [0, 1.0]")
        return self


class DenoisedObjective(Section):
    """Cross-entropy on images that were noised and denoised again (Carlini et al. 2023, 4.1)."""

    kind: Literal["denoised"]
    sigma: PositivePixels
    denoiser: DenoiserName  # a variant of this recipe, diffusers:PATH or model:PATH


class OneShotSampler(Section):
    """One pass of the network (Carlini et al. 2023, alg. 1)."""

    kind: Literal["one-shot"] = "one-shot"


class AncestralSampler(Section):
    """Many small random steps back through the schedule (Ho et al. 2020)."""

    kind: Literal["ancestral"]
    num_steps: Count | None = None  # None: every timestep of the noise level and below
    start: Literal["exact", "reference"] = "exact"  # reference: the authors' code, a timestep below


class HeunSampler(Section):
    """The probability flow in deterministic steps of second order (Karras et al. 2022)."""

    kind: Literal["heun"]
    num_levels: Annotated[int, Field(ge=2)] = 18  # 2 num_levels - 1 passes
    last: Annotated[float, Field(gt=0)] = 0.002
    rho: Annotated[float, Field(gt=0)] = 7.0


Sampler = Annotated[OneShotSampler | AncestralSampler | HeunSampler, Field(discriminator="kind")]


def is_on_disk(denoiser: str) -> bool:
    """Whether it names a folder, not a model of the recipe."""
    return denoiser.startswith(SOURCES)
