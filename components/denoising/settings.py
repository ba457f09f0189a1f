"""Settings of samplers, and names of denoisers in recipes."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge

from components.core.settings import ByKind, Count, Positive, Settings, settings

if TYPE_CHECKING:
    from components.denoising.schedule import NoiseSchedule

ARCHITECTURES = ("tiny_unet", "unet")  # networks that estimate images; all others are classifiers
SOURCES = ("diffusers:", "model:")  # prefixes of denoisers on disk


class DenoiserReference:
    """Marks the name of a denoiser: a model of the recipe, diffusers:PATH or model:PATH."""

    @staticmethod
    def read(value: object) -> str:
        """The name; raises `ValueError` if it is not valid."""
        if not isinstance(value, str) or not value:
            raise ValueError("is not the name of a denoiser")
        if ":" in value and not value.startswith(SOURCES):
            raise ValueError(
                "is neither a model of train.variants nor diffusers:PATH or model:PATH"
            )
        return value


DenoiserName = Annotated[str, DenoiserReference()]


def is_on_disk(denoiser: str) -> bool:
    """Whether the text names a folder, not a model of the recipe."""
    return denoiser.startswith(SOURCES)


class SamplerBase(Settings):
    """Base of the samplers' settings."""

    __slots__ = ()

    kind: str
    puts_noise_back: ClassVar[bool] = False
    """Whether the sampler needs the variance of a step."""

    def num_passes(self, schedule: "NoiseSchedule", sigma: float) -> int:
        """Passes of the network for each noisy image."""
        return 1


@settings
class OneShotSettings(SamplerBase):
    """One pass of the network (Carlini et al. 2023, alg. 1)."""

    kind: Literal["one-shot"] = "one-shot"


@settings
class AncestralSettings(SamplerBase):
    """Many small random steps back through the schedule (Ho et al. 2020)."""

    puts_noise_back = True

    kind: Literal["ancestral"] = "ancestral"
    num_steps: Count | None = None
    """None: every timestep from the noise level down."""
    start: Literal["exact", "reference"] = "exact"
    """`reference`: as in the authors' code, one timestep below the noise level."""

    def num_passes(self, schedule: "NoiseSchedule", sigma: float) -> int:
        below = schedule.timesteps_below(sigma, num_steps=self.num_steps)
        leaves_lower = self.start == "reference" and bool(below)
        return len(below) + (not leaves_lower)


@settings
class HeunSettings(SamplerBase):
    """The probability flow ODE in deterministic steps of second order (Karras et al. 2022)."""

    kind: Literal["heun"] = "heun"
    num_levels: Annotated[int, Ge(2)] = 18
    """Noise levels; the network is called 2 num_levels - 1 times."""
    last: Positive = 0.002
    """Lowest noise level, on the scale of pixels in [-1, 1]."""
    rho: Positive = 7.0
    """Spacing of the levels: larger values put more of them at low noise."""

    def num_passes(self, schedule: "NoiseSchedule", sigma: float) -> int:
        return 2 * self.num_levels - 1


SamplerSettings = Annotated[OneShotSettings | AncestralSettings | HeunSettings, ByKind()]
