"""Training on Gaussian noise (Cohen et al. 2019, sec. 3.3), with or without denoising.

Classifiers behind a frozen denoiser are fine-tuned on its outputs (Carlini et al. 2023,
"(Certified!!) adversarial robustness for free!", sec. 4.1).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from components.core.errors import CasemateError
from components.core.seeding import generator_for
from components.core.settings import plain
from components.core.types import Images, Logits
from components.denoising.loading import load_denoiser, source_digest
from components.denoising.samplers import Draws, OneShot
from components.denoising.settings import is_on_disk
from components.train.objectives.base import Batch, LossOut, Objective, cross_entropy
from components.train.objectives.settings import DenoisedTrainingSettings, GaussianTrainingSettings

# Noisy images, their sigma in [0, 1] pixels, normals for denoisers that draw -> clean estimates
Denoise = Callable[[Images, float, Draws], Images]


def noise_of(batch: Batch, stream: str) -> Tensor:
    """Standard normals of the images' shape; each row a function of (seed, epoch, item)."""
    noise = [
        torch.randn(
            batch.images.shape[1:], generator=generator_for(batch.seed, stream, batch.epoch, item)
        )
        for item in batch.item_ids
    ]
    return torch.stack(noise).to(batch.images.device, non_blocking=True)


class GaussianNoise(Objective):
    """Cross-entropy on x + N(0, sigma^2 I); the noise is never clamped, as in certification."""

    settings: GaussianTrainingSettings | DenoisedTrainingSettings

    def loss(self, wrapped: nn.Module, bare: nn.Module, batch: Batch) -> LossOut:
        logits = wrapped(self.shown(batch, "noise"))
        loss = cross_entropy(logits, batch, label_smoothing=self.label_smoothing)
        return LossOut(loss, logits.detach())

    def validation_logits(self, bare: nn.Module, batch: Batch) -> Logits:
        logits: Logits = bare(self.shown(batch, "noise-val"))
        return logits

    def shown(self, batch: Batch, stream: str) -> Images:
        """The input images of the model."""
        return batch.images + self.settings.sigma * noise_of(batch, stream)


class DenoisedFineTuning(GaussianNoise):
    """Cross-entropy on denoise(x + N(0, sigma^2 I)); gradients do not enter the denoiser.

    One model for each sigma, the sigma of its certification. Noise and the denoiser's samples are
    functions of items and are fresh in every epoch.
    """

    settings: DenoisedTrainingSettings

    def __init__(
        self, settings: DenoisedTrainingSettings, *, denoise: Denoise, label_smoothing: float
    ) -> None:
        super().__init__(settings, label_smoothing=label_smoothing)
        self.denoise = denoise

    @classmethod
    def build(cls, settings: Any, *, label_smoothing: float, start: str | None) -> Objective:
        """The objective with the denoiser from its folder."""
        if not is_on_disk(settings.denoiser):
            remedy = "is not trained yet; name a denoiser on disk: diffusers:PATH or model:PATH"
            raise CasemateError("train.objective.denoiser", settings.denoiser, remedy)
        denoiser = load_denoiser(settings.denoiser)
        denoiser.diffusion.schedule.check(settings.sigma)
        return cls(settings, denoise=OneShot(denoiser=denoiser), label_smoothing=label_smoothing)

    @classmethod
    def trained_for(cls, settings: Any, *, start: str | None) -> dict[str, Any]:
        """The settings, with the digest of the denoiser instead of its path."""
        values: dict[str, Any] = plain(settings)
        if is_on_disk(settings.denoiser):
            values["denoiser"] = source_digest(settings.denoiser)
        return values

    @torch.no_grad()
    def shown(self, batch: Batch, stream: str) -> Images:
        noisy, sigma = super().shown(batch, stream), self.settings.sigma
        return self.denoise(noisy, sigma, lambda step: noise_of(batch, f"{stream}-denoiser-{step}"))
