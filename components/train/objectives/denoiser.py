"""Training a denoiser for the noise that certification will show it, and for no other.

Carlini et al. 2023, "(Certified!!) adversarial robustness for free!", sec. 5.2; noise prediction is
eq. 14 of Ho et al. 2020. A diffusion model works on u = 2 x - 1 in [-1, 1]; sigma is always quoted
for x in [0, 1], so a level matches when (1 - abar_t) / abar_t = (2 sigma)^2.

Symbols: abar_t = `alphas_cumprod[t]`, falling in t; u_t = sqrt(abar_t) u + sqrt(1 - abar_t) n.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from components.core.errors import CasemateError
from components.core.seeding import generator_for
from components.train.objectives.base import Batch
from components.train.objectives.inner import check_choice
from components.train.objectives.noise import noise_of

NoisePredictor = Callable[[Tensor, Tensor], Tensor]  # (B, C, H, W) u_t, (B,) t -> (B, C, H, W) n


def sigmas_of(alphas_cumprod: Tensor) -> Tensor:
    """(T,) float64: the sigma in [0, 1] pixels of every timestep, rising."""
    abar = alphas_cumprod.double()
    return ((1 - abar) / abar).sqrt() / 2


def timesteps_of(sigmas: Tensor, alphas_cumprod: Tensor) -> Tensor:
    """The first timestep with at least so much noise: rounding never understates it."""
    levels = sigmas_of(alphas_cumprod)
    timesteps = torch.searchsorted(levels, sigmas.double())
    if bool((timesteps == len(levels)).any()):
        remedy = f"is beyond the schedule, which ends at {float(levels[-1]):.3g}"
        raise CasemateError("denoiser.sigma", float(sigmas.max()), remedy)
    return timesteps


@dataclass(frozen=True, slots=True, eq=False)
class DenoiserTraining:
    """Mean squared error of the predicted noise, over a restricted range of noise levels.

    The range is a set of `sigmas`, or an `interval`, or with neither the whole schedule. On an
    interval `sampling` draws sigma uniformly and rounds it to a timestep, or draws uniformly among
    the timesteps within; sets and the whole schedule are drawn uniformly.
    """

    alphas_cumprod: Tensor
    sigmas: tuple[float, ...] = ()
    interval: tuple[float, float] | None = None
    sampling: str = "sigma"

    def __post_init__(self) -> None:
        check_choice("denoiser.sampling", self.sampling, ("sigma", "timestep"))
        if self.sigmas and self.interval:
            remedy = "contradict denoiser.interval; choose one of them"
            raise CasemateError("denoiser.sigmas", self.sigmas, remedy)
        if self.interval and not 0 <= self.interval[0] < self.interval[1]:
            raise CasemateError("denoiser.interval", self.interval, "is no interval from 0 upwards")
        self.allowed()  # refuses levels beyond the schedule

    def allowed(self) -> Tensor:
        """int64 timesteps, rising: all that training may meet."""
        if self.sigmas:
            wanted = torch.tensor(sorted(self.sigmas), dtype=torch.float64)
            return timesteps_of(wanted, self.alphas_cumprod)
        if self.interval is None:
            return torch.arange(len(self.alphas_cumprod))
        low, high = self._ends(self.interval)
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
            return timesteps_of(low + (high - low) * share, self.alphas_cumprod)
        allowed = self.allowed()
        return allowed[(share * len(allowed)).long()]

    def loss(self, predict: NoisePredictor, batch: Batch, *, stream: str = "denoiser") -> Tensor:
        """Mean over items, channels and pixels of |n - predict(u_t, t)|^2."""
        device = batch.images.device
        timesteps = self.timesteps(batch, f"{stream}-timestep")
        abar = self.alphas_cumprod.double()[timesteps].float().view(-1, 1, 1, 1).to(device)
        noise = noise_of(batch, stream)
        noisy = abar.sqrt() * (2 * batch.images - 1) + (1 - abar).sqrt() * noise
        return F.mse_loss(predict(noisy, timesteps.to(device)), noise)

    def _ends(self, interval: tuple[float, float]) -> tuple[int, int]:
        wanted = torch.tensor(interval, dtype=torch.float64)
        low, high = timesteps_of(wanted, self.alphas_cumprod).tolist()
        return low, high
