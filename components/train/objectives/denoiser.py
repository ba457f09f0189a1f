"""Training of a denoiser at the noise levels of certification.

Carlini et al. 2023, "(Certified!!) adversarial robustness for free!", sec. 5.2; noise prediction is
eq. 14 of Ho et al. 2020. Sigma is always quoted for pixels in [0, 1]; `denoising/schedule.py`
maps it to a timestep.

Symbols: u = 2 x - 1 in [-1, 1]; u_t = sqrt(abar_t) u + sqrt(1 - abar_t) n.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from components.core.errors import CasemateError
from components.core.seeding import generator_for
from components.core.settings import default_of, plain
from components.denoising.denoiser import on_schedule, to_pixels
from components.denoising.diffusion import Diffusion
from components.denoising.loading import describe_source
from components.denoising.schedule import abar_of
from components.models.pixels import PixelModel
from components.train.objectives.base import Batch, LossOut, Objective
from components.train.objectives.noise import noise_of
from components.train.objectives.settings import DenoiserTrainingSettings

KEY = "train.objective"
PROBES = (0.25, 0.5, 1.0)  # sigmas of the validation of a whole schedule: those of the paper


class DenoiserTraining(Objective):
    """Mean squared error of the predicted noise, over a restricted range of noise levels.

    The levels are a set of `sigmas`, or a `range`, or the `full` schedule. In a range `sampling`
    draws sigma uniformly and rounds it up to a timestep, or draws uniformly among the timesteps
    within; sets and the whole schedule are drawn uniformly.
    """

    settings: DenoiserTrainingSettings
    classifies = False
    validation_metric = "val_mse"
    lower_is_better = True

    def __init__(self, settings: DenoiserTrainingSettings, *, diffusion: Diffusion) -> None:
        super().__init__(settings, label_smoothing=0.0)  # there are no labels
        self.diffusion = diffusion
        self.allowed()  # raises for levels beyond the schedule

    @classmethod
    def build(cls, settings: Any, *, label_smoothing: float, start: str | None) -> Objective:
        return cls(settings, diffusion=diffusion_of(settings, start))

    @classmethod
    def trained_for(cls, settings: Any, *, start: str | None) -> dict[str, Any]:
        """The settings and the noise levels."""
        values: dict[str, Any] = plain(settings)
        return values | {"diffusion": diffusion_of(settings, start).to_dict()}

    def allowed(self) -> Tensor:
        """Ascending int64 timesteps that training may draw."""
        schedule = self.diffusion.schedule
        if self.settings.sigmas:
            return torch.from_numpy(
                schedule.timesteps_at_least(np.array(sorted(self.settings.sigmas)))
            )
        if self.settings.range is None:
            return torch.arange(len(schedule))
        low, high = schedule.timesteps_at_least(np.array(self.settings.range)).tolist()
        return torch.arange(low, high + 1)

    def timesteps(self, batch: Batch, stream: str) -> Tensor:
        """(B,) int64, each a function of (seed, epoch, item)."""
        draws = [
            torch.rand((), generator=generator_for(batch.seed, stream, batch.epoch, item)).double()
            for item in batch.item_ids
        ]
        share = torch.stack(draws)  # [0, 1)
        if self.settings.range is not None and self.settings.sampling == "sigma":
            low, high = self.settings.range
            wanted = (low + (high - low) * share).numpy()
            return torch.from_numpy(self.diffusion.schedule.timesteps_at_least(wanted))
        allowed = self.allowed()
        return allowed[(share * len(allowed)).long()]

    def loss(self, wrapped: nn.Module, bare: nn.Module, batch: Batch) -> LossOut:
        """Mean over items, channels and pixels of |n - n_hat(u_t, t)|^2.

        Networks with other targets (clean images, v) use the same loss. A variance that the
        network also predicts is not trained: denoising in one step does not use it.
        """
        device = batch.images.device
        timesteps = self.timesteps(batch, "denoiser-timestep")
        table = torch.from_numpy(self.diffusion.schedule.alphas_cumprod)
        abar = table[timesteps].float().view(-1, 1, 1, 1).to(device, non_blocking=True)
        clean, noise = 2 * batch.images - 1, noise_of(batch, "denoiser")
        noisy = abar.sqrt() * clean + (1 - abar).sqrt() * noise
        times = self.diffusion.times(timesteps).to(device, non_blocking=True)
        # as pixels: the model itself maps [0, 1] to [-1, 1]
        output = wrapped(to_pixels(noisy), None, times)[:, : clean.shape[1]]
        return LossOut(F.mse_loss(output, self.diffusion.target(clean, noise, abar)))

    def validation_scores(self, bare: PixelModel, batch: Batch) -> Tensor:
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
        """The sigmas of the set, the middle and the end of a range, or those of the paper."""
        if self.settings.sigmas:
            return tuple(sorted(self.settings.sigmas))
        if self.settings.range is not None:
            return (sum(self.settings.range) / 2, self.settings.range[1])
        schedule = self.diffusion.schedule
        return tuple(sigma for sigma in PROBES if sigma <= schedule.sigmas[-1])


def diffusion_of(settings: DenoiserTrainingSettings, start: str | None) -> Diffusion:
    """Noise levels of a denoiser in training; with weights on disk, the levels of `start`.

    The weights determine what is predicted and how timesteps are encoded; a schedule in the
    settings must match theirs.
    """
    key = f"{KEY}.schedule"
    if start is None:
        if settings.schedule == "pretrained":
            raise CasemateError(key, "pretrained", "needs model.pretrained: diffusers:PATH")
        return Diffusion.named(settings.schedule, settings.num_timesteps)
    known = describe_source(start).diffusion
    if settings.schedule == "pretrained":
        _check_number(settings, len(known.schedule), start)
        return known
    wanted = Diffusion.named(settings.schedule, settings.num_timesteps)
    ours, theirs = (d.schedule.alphas_cumprod for d in (wanted, known))
    if len(ours) != len(theirs) or not np.allclose(ours, theirs, rtol=1e-4, atol=1e-6):
        remedy = (
            f"is not the schedule of {start}: {_in_words(known)}; "
            "schedule: pretrained trains with that one"
        )
        raise CasemateError(key, _in_words(wanted), remedy)
    return known


def _check_number(settings: DenoiserTrainingSettings, found: int, start: str) -> None:
    """Reject a number of timesteps other than that of the weights; the default is not checked."""
    default = default_of(DenoiserTrainingSettings, "num_timesteps")
    if settings.num_timesteps not in (default, found):
        remedy = f"is not the number of {start}, {found}; omit it with schedule: pretrained"
        raise CasemateError(f"{KEY}.num_timesteps", settings.num_timesteps, remedy)


def _in_words(known: Diffusion) -> str:
    """A schedule in words: kind, number of timesteps, first and last beta."""
    config, betas = known.config, known.schedule.betas
    trained = config.get("trained_betas") is not None
    kind = "trained_betas" if trained else config.get("beta_schedule")
    return f"{kind}, {len(betas)} timesteps, betas {betas[0]:.4g} to {betas[-1]:.4g}"
