"""Settings of a model: architecture, input adapter and the weights it starts from."""

from collections.abc import Iterator, Sequence
from dataclasses import field
from typing import Any, Literal

from components.core import user_code
from components.core.settings import Problem, Settings, Side, settings

TIMM = "timm"  # as `pretrained`: the weights of timm


@settings
class ModelSettings(Settings):
    """An architecture, its input adapter and the weights it starts from."""

    architecture: str = "tiny_vit"
    """A name of `casemate models`, any timm name, or python:FILE.py:FACTORY."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the architecture, e.g. patch_size."""
    upsample: Side | None = None
    """Side of the image that the network sees; None: that of the data."""
    upsample_mode: Literal["nearest", "bilinear", "bicubic"] = "nearest"
    """Interpolation of `upsample`."""
    mean: tuple[float, ...] | None = None
    """Per channel; None: 0.5 in every channel, or that of the pretrained weights."""
    std: tuple[float, ...] | None = None
    """Per channel, of pixels in [0, 1]; None: as with `mean`."""
    token_policy: Literal["drop", "mask"] = "mask"
    """What ablations do to tokens that are hidden entirely."""
    pretrained: str | None = None
    """`timm` or a model folder; for a denoiser diffusers:PATH or model:PATH; None: random."""

    def __post_init__(self) -> None:
        pinned = user_code.pinned(self.architecture, field="architecture")
        object.__setattr__(self, "architecture", pinned)
        Settings.__post_init__(self)

    def problems(self) -> Iterator[Problem]:
        return normalisation_problems(self.mean, self.std)


def normalisation_problems(
    mean: Sequence[float] | None, std: Sequence[float] | None
) -> Iterator[Problem]:
    """Problems of the mean and deviation per channel that images are normalised with."""
    if mean and not all(0 <= value <= 1 for value in mean):
        remedy = "is outside [0, 1]; pixels are fractions of full scale"
        yield Problem("mean", list(mean), remedy)
    if std and not all(value > 0 for value in std):
        yield Problem("std", list(std), "must be above 0: images are divided by it")
