"""Training on Gaussian noise (Cohen et al. 2019, sec. 3.3), as it is or denoised first.

Classifiers behind a frozen denoiser are fine-tuned on what it gives them (Carlini et al. 2023,
"(Certified!!) adversarial robustness for free!", sec. 4.1).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from components.core.seeding import generator_for
from components.core.types import Images, Logits
from components.denoising.samplers import Draws
from components.train.objectives.base import Batch, LossOut, Objective, cross_entropy

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
    return torch.stack(noise).to(batch.images.device)


@dataclass(frozen=True, slots=True)
class GaussianNoise(Objective):
    """Cross-entropy on x + N(0, sigma^2 I); the noise is never clamped, as in certification."""

    sigma: float
    label_smoothing: float = 0.0

    def loss(self, wrapped: nn.Module, bare: nn.Module, batch: Batch) -> LossOut:
        logits = wrapped(self._noisy(batch, "noise"))
        loss = cross_entropy(logits, batch, label_smoothing=self.label_smoothing)
        return LossOut(loss, logits.detach())

    def validation_logits(self, bare: nn.Module, batch: Batch) -> Logits:
        logits: Logits = bare(self._noisy(batch, "noise-val"))
        return logits

    def _noisy(self, batch: Batch, stream: str) -> Images:
        return batch.images + self.sigma * noise_of(batch, stream)


@dataclass(frozen=True, slots=True)
class DenoisedFineTuning(Objective):
    """Cross-entropy on denoise(x + N(0, sigma^2 I)); no gradient enters the denoiser.

    One model for each sigma, the one that it will be certified at. Noise, and what the denoiser
    draws, belongs to items and is fresh in every epoch.
    """

    denoise: Denoise
    sigma: float
    label_smoothing: float = 0.0

    def loss(self, wrapped: nn.Module, bare: nn.Module, batch: Batch) -> LossOut:
        logits = wrapped(self.denoised(batch, "noise"))
        loss = cross_entropy(logits, batch, label_smoothing=self.label_smoothing)
        return LossOut(loss, logits.detach())

    def validation_logits(self, bare: nn.Module, batch: Batch) -> Logits:
        logits: Logits = bare(self.denoised(batch, "noise-val"))
        return logits

    @torch.no_grad()
    def denoised(self, batch: Batch, stream: str) -> Images:
        noisy = batch.images + self.sigma * noise_of(batch, stream)
        return self.denoise(
            noisy, self.sigma, lambda step: noise_of(batch, f"{stream}-denoiser-{step}")
        )
