"""Cross-entropy on clean images."""

from torch import Tensor, nn
from torch.nn import functional as F

from components.core.types import Logits
from components.data.augment.mixing import smoothed_targets
from components.train.objectives.base import Batch, LossOut, Objective, cross_entropy
from components.train.objectives.settings import StandardSettings


class Standard(Objective):
    """Empirical risk, with softmax (`ce`) or one binary cross-entropy per class (`bce`)."""

    settings: StandardSettings

    def loss(self, wrapped: nn.Module, bare: nn.Module, batch: Batch) -> LossOut:
        logits = wrapped(batch.images)
        measure = cross_entropy if self.settings.criterion == "ce" else binary_cross_entropy
        loss = measure(logits, batch, label_smoothing=self.label_smoothing)
        return LossOut(loss, logits.detach())


def binary_cross_entropy(logits: Logits, batch: Batch, *, label_smoothing: float) -> Tensor:
    """Mean over items and classes; every class with a part in a mixed image counts as present.

    Wightman et al. 2021 (arXiv:2110.00476), sec. 2. `label_smoothing` must be the one that mixing
    used: every absent class then has 1/K of it, and present classes exceed that.
    """
    num_classes = logits.shape[1]
    if batch.targets is None:
        wanted = smoothed_targets(batch.labels, num_classes=num_classes, smoothing=label_smoothing)
    else:
        # the margin is far below any visible part and above the rounding of float32
        wanted = batch.targets > label_smoothing / num_classes + 1e-6
    return F.binary_cross_entropy_with_logits(logits, wanted.to(logits.dtype))
