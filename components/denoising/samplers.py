"""Denoising in one step, in many random steps, or along an ODE.

All of them take pixels x + sigma n with x in [0, 1] and return estimates of x on the same scale.

| sampler | network passes | randomness |
|---|---|---|
| `OneShot` | 1 | none |
| `Ancestral` | one per timestep, or `num_steps` | fresh normals from the caller |
| `Heun` | 2 `num_levels` - 1 | none |
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from components.core.errors import CasemateError
from components.core.noise_streams import NoiseKind
from components.core.seeding import DrawSpan, device_normals, standard_normals
from components.core.settings import settings
from components.core.types import Images
from components.denoising.denoiser import Denoiser, on_schedule, to_pixels
from components.denoising.schedule import abar_of
from components.denoising.settings import AncestralSettings, HeunSettings, OneShotSettings

# Step -> standard normals in the shape of the images. A randomised classifier is certified only if
# they are independent of the noise in the images and fresh for each of them.
Draws = Callable[[int], Tensor]
VARIANCES = ("fixed_small", "fixed_small_log", "fixed_large", "learned_range")


class Sampler(Protocol):
    """Denoises images; only random samplers call `draws`."""

    @property
    def denoiser(self) -> Denoiser: ...

    def __call__(self, noisy: Images, sigma: float, draws: Draws) -> Images: ...


def draws_of_samples(
    copies: DrawSpan,
    *,
    shape: tuple[int, ...],
    noise: NoiseKind = "numpy",
    device: torch.device | str = "cpu",
) -> Draws:
    """Draws of a sampler for these noisy copies of an item, on any worker.

    The stream of `copies` is that of the noise in them; the sampler derives its own streams from
    it. If draws that choose a class shared them with draws that bound its probability, the two
    would not be independent. The generator is that of the noise in the copies.
    """

    def draw(step: int) -> Tensor:
        own = copies._replace(stream=f"denoise-{copies.stream}-{step}")
        if noise == "philox":
            return device_normals(own, shape=shape, device=device)
        return torch.from_numpy(standard_normals(own, shape=shape))

    return draw


@settings
class OneShot(OneShotSettings):
    """The network's estimate in one pass (Carlini et al. 2023, alg. 1 and sec. 5.3)."""

    denoiser: Denoiser

    def __call__(self, noisy: Images, sigma: float, draws: Draws) -> Images:
        abar, timestep = abar_of(sigma), self.denoiser.timestep(2 * sigma)
        u = on_schedule(noisy, sigma)
        return to_pixels(self.denoiser.estimate(u, abar=abar, timestep=timestep))


@settings
class Ancestral(AncestralSettings):
    """Ancestral sampling: each step removes noise and adds a smaller amount back.

    Ho et al. 2020, eqs. 6 and 7, with the variance of Nichol & Dhariwal 2021, eq. 15, where it is
    learned. The first step starts at the exact level of sigma, between two timesteps. With
    `num_steps`, only this many timesteps are visited, evenly spaced. `start: reference` treats
    images of that level as those of the timestep below, as the authors' code does.
    """

    denoiser: Denoiser

    def __post_init__(self) -> None:
        AncestralSettings.__post_init__(self)
        check_variance(self.denoiser.diffusion.variance)

    def __call__(self, noisy: Images, sigma: float, draws: Draws) -> Images:
        u = on_schedule(noisy, sigma)
        levels = self.levels(sigma)
        for step, ((abar, timestep), (abar_next, _)) in enumerate(
            zip(levels, [*levels[1:], (1.0, -1.0)], strict=True)
        ):
            u = self._step(u, abar, abar_next, timestep, step, draws)
        return to_pixels(u)

    def levels(self, sigma: float) -> list[tuple[float, float]]:
        """(abar, timestep) of every level that is visited, the noisiest first."""
        schedule = self.denoiser.diffusion.schedule
        below = schedule.timesteps_below(sigma, num_steps=self.num_steps)
        first = (abar_of(sigma), self.denoiser.timestep(2 * sigma))
        further = [(float(schedule.alphas_cumprod[t]), float(t)) for t in below]
        return further if self.start == "reference" and further else [first, *further]

    def _step(
        self, u: Tensor, abar: float, abar_next: float, timestep: float, step: int, draws: Draws
    ) -> Tensor:
        output = self.denoiser.output(u, timestep)
        clean = self.denoiser.diffusion.clean(output, u, abar)
        if abar_next == 1:
            return clean  # the last step: the mean is the estimate, no noise is added
        alpha = abar / abar_next
        beta = 1 - alpha
        small = beta * (1 - abar_next) / (1 - abar)  # variance of the posterior given u_0
        mean = (math.sqrt(abar_next) * beta / (1 - abar)) * clean
        mean = mean + (math.sqrt(alpha) * (1 - abar_next) / (1 - abar)) * u
        return mean + self._deviation(output, u, small, beta) * draws(step).to(u)

    def _deviation(self, output: Tensor, u: Tensor, small: float, large: float) -> Tensor | float:
        variance = self.denoiser.diffusion.variance
        if variance == "learned_range":
            check_variance(variance, predicted=output.shape[1] == 2 * u.shape[1])
            share = (output[:, u.shape[1] :] + 1) / 2
            return torch.exp((share * math.log(large) + (1 - share) * math.log(small)) / 2)
        return math.sqrt(large if variance == "fixed_large" else small)


def check_variance(variance: str, *, predicted: bool = True) -> None:
    """Reject ancestral sampling if the variance is unknown, or learned but not `predicted`."""
    key = "denoiser.scheduler.variance_type"
    if variance not in VARIANCES:
        remedy = f"is not supported by ancestral sampling; choose one of {', '.join(VARIANCES)}"
        raise CasemateError(key, variance, remedy)
    if variance == "learned_range" and not predicted:
        remedy = "needs a network that predicts it: twice as many output as input channels"
        raise CasemateError(key, variance, remedy)


@settings
class Heun(HeunSettings):
    """Deterministic probability flow (Karras et al. 2022, alg. 1 with eq. 5 for the levels).

    The state is z = u + s n, with s from 2 sigma down to `last` and then 0.
    """

    denoiser: Denoiser

    def __call__(self, noisy: Images, sigma: float, draws: Draws) -> Images:
        z, levels = 2 * noisy - 1, self.levels(sigma)
        for level, following in zip(levels, [*levels[1:], 0.0], strict=True):
            slope = self._slope(z, level)
            moved = z + (following - level) * slope
            if following > 0:
                slope = (slope + self._slope(moved, following)) / 2
                moved = z + (following - level) * slope
            z = moved
        return to_pixels(z)

    def levels(self, sigma: float) -> list[float]:
        """Noise-to-signal ratios, descending; the last one is above 0."""
        if 2 * sigma <= self.last:
            raise CasemateError("sigma", sigma, f"is not above the last level {self.last / 2:g}")
        ends = (2 * sigma) ** (1 / self.rho), self.last ** (1 / self.rho)
        return [float(root**self.rho) for root in np.linspace(*ends, self.num_levels)]

    def _slope(self, z: Tensor, ratio: float) -> Tensor:
        """dz/ds = (z - D(z, s)) / s, where D is the estimate of the clean image."""
        abar = 1 / (1 + ratio**2)
        timestep = self.denoiser.timestep(ratio)
        clean = self.denoiser.estimate(math.sqrt(abar) * z, abar=abar, timestep=timestep)
        return (z - clean) / ratio


SAMPLERS: Mapping[str, Callable[..., Sampler]] = {
    "one-shot": OneShot,
    "ancestral": Ancestral,
    "heun": Heun,
}


def make_sampler(fields: Mapping[str, Any], denoiser: Denoiser) -> Sampler:
    """Return the sampler of plain settings: a `kind` and the fields of that kind."""
    kind = fields["kind"]
    if kind not in SAMPLERS:
        remedy = f"is unknown; choose one of {', '.join(SAMPLERS)}"
        raise CasemateError("sampler.kind", kind, remedy)
    return SAMPLERS[kind](denoiser=denoiser, **fields)
