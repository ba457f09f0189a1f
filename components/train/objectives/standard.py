"""Cross-entropy on clean images."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import nn

from components.core.types import Logits
from components.train.objectives.base import Batch, LossOut


@dataclass(frozen=True, slots=True)
class Standard:
    """Plain empirical risk."""

    label_smoothing: float = 0.0

    def loss(self, wrapped: nn.Module, bare: nn.Module, batch: Batch) -> LossOut:
        logits = wrapped(batch.images)
        loss = F.cross_entropy(logits, batch.labels, label_smoothing=self.label_smoothing)
        return LossOut(loss, logits.detach())

    def validation_logits(self, bare: nn.Module, batch: Batch) -> Logits:
        logits: Logits = bare(batch.images)
        return logits
