"""Training on Gaussian noise (Cohen et al. 2019, sec. 3.3)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from components.core.seeding import generator_for
from components.core.types import Images, Logits
from components.train.objectives.base import Batch, LossOut, cross_entropy


@dataclass(frozen=True, slots=True)
class GaussianNoise:
    """Cross-entropy on x + N(0, sigma^2 I); the noise is never clamped, as in certification."""

    sigma: float
    label_smoothing: float = 0.0

    def _noisy(self, batch: Batch, stream: str) -> Images:
        shape = batch.images.shape[1:]
        noise = [
            torch.randn(shape, generator=generator_for(batch.seed, stream, batch.epoch, item))
            for item in batch.item_ids
        ]
        noisy: Tensor = batch.images + self.sigma * torch.stack(noise).to(batch.images.device)
        return noisy

    def loss(self, wrapped: nn.Module, bare: nn.Module, batch: Batch) -> LossOut:
        logits = wrapped(self._noisy(batch, "noise"))
        loss = cross_entropy(logits, batch, label_smoothing=self.label_smoothing)
        return LossOut(loss, logits.detach())

    def validation_logits(self, bare: nn.Module, batch: Batch) -> Logits:
        logits: Logits = bare(self._noisy(batch, "noise-val"))
        return logits
