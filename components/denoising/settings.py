"""Settings of samplers, and names of denoisers in recipes."""

from typing import Annotated, Literal

from annotated_types import Ge

from components.core.settings import ByKind, Count, Positive, Settings, settings

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
    """Whether the name is a folder, not a model of the recipe."""
    return denoiser.startswith(SOURCES)


@settings
class OneShotSettings(Settings):
    """One pass of the network (Carlini et al. 2023, alg. 1)."""

    kind: Literal["one-shot"] = "one-shot"


@settings
class AncestralSettings(Settings):
    """Many small random steps back through the schedule (Ho et al. 2020)."""

    kind: Literal["ancestral"] = "ancestral"
    num_steps: Count | None = None
    """None: every timestep from the noise level down."""
    start: Literal["exact", "reference"] = "exact"
    """`reference`: as in the authors' code, one timestep below the noise level."""


@settings
class HeunSettings(Settings):
    """The probability flow ODE in deterministic steps of second order (Karras et al. 2022)."""

    kind: Literal["heun"] = "heun"
    num_levels: Annotated[int, Ge(2)] = 18
    """Noise levels; the network is called 2 num_levels - 1 times."""
    last: Positive = 0.002
    rho: Positive = 7.0


SamplerSettings = Annotated[OneShotSettings | AncestralSettings | HeunSettings, ByKind()]
