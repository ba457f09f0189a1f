"""A denoiser: a diffusion network and the conversion of noisy [0, 1] pixels to its input.

Certificates are sound for any network, timestep and rounding: Gaussian noise of the claimed sigma
is added before this code runs, and everything after it is part of the classifier (Carlini et al.
2023, sec. 3).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from components.core.errors import CasemateError
from components.core.types import Images
from components.denoising.diffusion import Diffusion
from components.denoising.schedule import abar_of

CHANNELS_LAST_FROM = 32  # side in pixels at which the network works


class Denoiser(nn.Module):
    """A frozen network with its `Diffusion`.

    `network` maps (B, C, H, W) noisy images on [-1, 1] and (B,) times to (B, C or 2 C, H, W).
    """

    def __init__(
        self,
        network: nn.Module,
        diffusion: Diffusion,
        *,
        channels: int,
        stride: int = 1,
        takes_fractions: bool = True,
    ) -> None:
        super().__init__()
        self.network, self.diffusion = network.requires_grad_(False).eval(), diffusion
        self.channels, self.stride, self.takes_fractions = channels, stride, takes_fractions

    def with_fast_layout(self, image_size: int) -> "Denoiser":
        """The denoiser with weights in the fastest memory layout for images of this side.

        Measured on a CPU: channels last gains up to a fifth at 32 pixels and costs a tenth at 16.
        """
        if image_size // getattr(self.network, "patch", 1) >= CHANNELS_LAST_FROM:
            self.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return self

    def check(self, *, channels: int, image_size: int, sigma: float) -> None:
        """Raise an error for images or noise that the network cannot denoise."""
        self._check_images((channels, image_size, image_size))
        self.diffusion.schedule.check(sigma)

    def _check_images(self, shape: Sequence[int]) -> None:
        channels, *sides = shape
        if channels != self.channels:
            remedy = f"input channels, but the images of the classifier have {channels}"
            raise CasemateError("denoiser", self.channels, remedy)
        for side in sides:
            if side % self.stride:
                remedy = f"is not a multiple of {self.stride}, which the denoiser needs"
                raise CasemateError("image side", side, remedy)

    def timestep(self, ratio: float) -> float:
        """Timestep of the noise-to-signal ratio s: fractional, or the next whole one above."""
        schedule = self.diffusion.schedule
        if self.takes_fractions:
            return schedule.timestep_of_ratio(ratio)
        return min(schedule.timestep_at_least(ratio / 2), len(schedule) - 1)

    def output(self, noisy: Tensor, timestep: float) -> Tensor:
        """Network output for images of one noise level, scaled as in training.

        Moves to the device of the images: objectives are built before the device is known.
        """
        self._check_images(noisy.shape[1:])
        weight = next(self.parameters(), None)
        if weight is not None and weight.device != noisy.device:
            self.to(noisy.device)
        timesteps = torch.full((len(noisy),), timestep, dtype=torch.float64)
        times = self.diffusion.times(timesteps).to(noisy.device)
        if not self.takes_fractions:
            times = times.long()
        result: Tensor = self.network(noisy, times)
        return result

    def estimate(self, noisy: Tensor, *, abar: float, timestep: float) -> Tensor:
        """u in [-1, 1] from sqrt(abar) u + sqrt(1 - abar) n."""
        return self.diffusion.clean(self.output(noisy, timestep), noisy, abar)


def on_schedule(noisy: Images, sigma: float) -> Tensor:
    """Pixels z = x + sigma n, x in [0, 1], as the model sees that level: sqrt(abar) (2 z - 1).

    abar is exact for sigma: rounding to a timestep does not change the noise level.
    """
    return (2 * noisy).sub_(1).mul_(math.sqrt(abar_of(sigma)))


def to_pixels(clean: Tensor) -> Images:
    """[-1, 1] to [0, 1]."""
    return (clean + 1).div_(2)
