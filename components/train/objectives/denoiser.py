"""Training a denoiser for the noise that certification will show it, and for no other.

Carlini et al. 2023, "(Certified!!) adversarial robustness for free!", sec. 5.2; noise prediction is
eq. 14 of Ho et al. 2020. Sigma is always quoted for pixels in [0, 1]; `denoising/schedule.py` says
which timestep that is.

Symbols: u = 2 x - 1 in [-1, 1]; u_t = sqrt(abar_t) u + sqrt(1 - abar_t) n.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from components.core.errors import CasemateError
from components.core.seeding import generator_for
from components.denoising.denoiser import on_schedule, to_pixels
from components.denoising.diffusion import Diffusion
from components.denoising.schedule import abar_of
from components.models.pixels import PixelModel
from components.train.objectives.base import Batch, EstimatingObjective, LossOut
from components.train.objectives.inner import check_choice
from components.train.objectives.noise import noise_of

KEY = "train.objective"
PROBES = (0.25, 0.5, 1.0)  # sigmas that a whole schedule is validated at: those of the paper


@dataclass(frozen=True, slots=True, eq=False)
class DenoiserTraining(EstimatingObjective):
    """Mean squared error of the predicted noise, over a restricted range of noise levels.

    The range is a set of `sigmas`, or an `interval`, or with neither the whole schedule. On an
    interval `sampling` draws sigma uniformly and rounds it up to a timestep, or draws uniformly
    among the timesteps within; sets and the whole schedule are drawn uniformly.
    """

    diffusion: Diffusion
    sigmas: tuple[float, ...] = ()
    interval: tuple[float, float] | None = None
    sampling: str = "sigma"

    def __post_init__(self) -> None:
        check_choice(f"{KEY}.sampling", self.sampling, ("sigma", "timestep"))
        if self.sigmas and self.interval:
            remedy = "contradict the range; choose one of them"
            raise CasemateError(f"{KEY}.sigmas", self.sigmas, remedy)
        if self.interval and not 0 <= self.interval[0] < self.interval[1]:
            raise CasemateError(f"{KEY}.range", self.interval, "is no interval from 0 upwards")
        self.allowed()  # refuses levels beyond the schedule

    def allowed(self) -> Tensor:
        """int64 timesteps, rising: all that training may meet."""
        schedule = self.diffusion.schedule
        if self.sigmas:
            return torch.from_numpy(schedule.timesteps_at_least(np.array(sorted(self.sigmas))))
        if self.interval is None:
            return torch.arange(len(schedule))
        low, high = schedule.timesteps_at_least(np.array(self.interval)).tolist()
        return torch.arange(low, high + 1)

    def timesteps(self, batch: Batch, stream: str) -> Tensor:
        """(B,) int64, each a function of (seed, epoch, item)."""
        draws = [
            torch.rand((), generator=generator_for(batch.seed, stream, batch.epoch, item)).double()
            for item in batch.item_ids
        ]
        share = torch.stack(draws)  # [0, 1)
        if self.interval is not None and self.sampling == "sigma":
            low, high = self.interval
            wanted = (low + (high - low) * share).numpy()
            return torch.from_numpy(self.diffusion.schedule.timesteps_at_least(wanted))
        allowed = self.allowed()
        return allowed[(share * len(allowed)).long()]

    def loss(self, wrapped: nn.Module, bare: nn.Module, batch: Batch) -> LossOut:
        """Mean over items, channels and pixels of |n - n_hat(u_t, t)|^2.

        For networks with other targets (clean images, v) the same with theirs. A variance that the
        network predicts besides is left alone: denoising in one step does not use it.
        """
        device = batch.images.device
        timesteps = self.timesteps(batch, "denoiser-timestep")
        table = torch.from_numpy(self.diffusion.schedule.alphas_cumprod)
        abar = table[timesteps].float().view(-1, 1, 1, 1).to(device)
        clean, noise = 2 * batch.images - 1, noise_of(batch, "denoiser")
        noisy = abar.sqrt() * clean + (1 - abar).sqrt() * noise
        times = self.diffusion.times(timesteps).to(device)
        # as pixels: the model itself maps [0, 1] to [-1, 1]
        output = wrapped(to_pixels(noisy), None, times)[:, : clean.shape[1]]
        return LossOut(F.mse_loss(output, self.diffusion.target(clean, noise, abar)))

    def validation_errors(self, bare: PixelModel, batch: Batch) -> Tensor:
        """(B,) mean squared error in [0, 1] pixels of one-shot estimates, over `validated_at`."""
        errors = []
        for sigma in self.validated_at():
            noisy = batch.images + sigma * noise_of(batch, f"denoiser-val-{sigma}")
            timestep = torch.full((len(noisy),), self.diffusion.schedule.timestep(sigma))
            u = on_schedule(noisy, sigma)
            output = bare(to_pixels(u), None, self.diffusion.times(timestep).to(noisy.device))
            clean = to_pixels(self.diffusion.clean(output, u, abar_of(sigma)))
            errors.append((clean - batch.images).square().flatten(1).mean(dim=1))
        return torch.stack(errors).mean(dim=0)

    def validated_at(self) -> tuple[float, ...]:
        """The sigmas of the set, the end and the middle of an interval, or those of the paper."""
        if self.sigmas:
            return tuple(sorted(self.sigmas))
        if self.interval is not None:
            return (sum(self.interval) / 2, self.interval[1])
        schedule = self.diffusion.schedule
        return tuple(sigma for sigma in PROBES if sigma <= schedule.sigmas[-1])
