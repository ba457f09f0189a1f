"""Training on column ablations (Salman et al. 2022, sec. 2 and app. A.3)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from components.core.seeding import generator_for
from components.core.types import Logits
from components.data.ablation import column_mask
from components.train.objectives.base import Batch, LossOut, cross_entropy


@dataclass(frozen=True, slots=True)
class ColumnAblation:
    """Cross-entropy on one visible band per global batch: dropped tokens make a dense batch."""

    band: int
    label_smoothing: float = 0.0

    def _visible(self, batch: Batch, stream: str) -> Tensor:
        height, width = batch.images.shape[-2:]
        generator = generator_for(batch.seed, stream, batch.epoch, batch.step)
        start = int(torch.randint(width, (), generator=generator))
        mask = column_mask(width, start, self.band)
        return mask.expand(height, width).to(batch.images.device)

    def loss(self, wrapped: nn.Module, bare: nn.Module, batch: Batch) -> LossOut:
        logits = wrapped(batch.images, self._visible(batch, "columns"))
        loss = cross_entropy(logits, batch, label_smoothing=self.label_smoothing)
        return LossOut(loss, logits.detach())

    def validation_logits(self, bare: nn.Module, batch: Batch) -> Logits:
        logits: Logits = bare(batch.images, self._visible(batch, "columns-val"))
        return logits
