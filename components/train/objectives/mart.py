"""MART: adversarial training that up-weights misclassified examples.

Wang et al. 2020, "Improving adversarial robustness requires revisiting misclassified examples",
eq. 11: BCE(p', y) + lambda KL(p || p') (1 - p_y), where BCE(p', y) = -log p'_y - log(1 - max of the
other p'_k) is their boosted cross-entropy (eq. 8). p, p' = softmax of clean and adversarial logits;
lambda is `beta` here, as in TRADES.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from components.attacks.losses import cross_entropy
from components.core.errors import CasemateError
from components.core.types import Images, Labels, Logits
from components.train.objectives.base import Batch, LossOut
from components.train.objectives.inner import AdversarialObjective
from components.train.objectives.settings import MartSettings
from components.train.objectives.trades import both_logits, item_divergences

# Constants of the published code: they bound log(1 - p'_k) and keep every weight positive.
BOUND, FLOOR, WEIGHT = 1.0001, 1e-12, 1.0000001


class Mart(AdversarialObjective):
    """Labels must be hard: the loss is weighted by the probability of the right class."""

    settings: MartSettings

    def craft(self, bare: nn.Module, batch: Batch) -> Images:
        return self.attack(bare, batch, _hard_labels(batch), cross_entropy)

    def outer_loss(
        self, wrapped: nn.Module, bare: nn.Module, batch: Batch, x_adv: Images
    ) -> LossOut:
        y = _hard_labels(batch)
        passes = self.settings.passes
        logits, adversarial = both_logits(wrapped, bare, batch.images, x_adv, passes=passes)
        divergences = item_divergences(logits, adversarial)
        own = logits.softmax(dim=1).gather(1, y[:, None]).squeeze(1)
        robust = (divergences * (WEIGHT - own)).mean()
        loss = boosted_cross_entropy(adversarial, y).mean() + self.settings.beta * robust
        metrics = {"divergence": divergences.mean().detach().double()}
        return LossOut(loss, logits.detach(), adversarial.detach(), metrics)


def boosted_cross_entropy(logits: Logits, y: Labels) -> Tensor:
    """(B,) cross-entropy, plus the term of the likeliest wrong class (eq. 8)."""
    wrong = logits.softmax(dim=1).scatter(1, y[:, None], 0.0).amax(dim=1)
    return F.cross_entropy(logits, y, reduction="none") - torch.log(BOUND - wrong + FLOOR)


def _hard_labels(batch: Batch) -> Labels:
    if batch.targets is not None:
        remedy = "makes soft labels, which mart cannot weigh; turn mixup and cutmix off"
        raise CasemateError("train.augment", "mixing", remedy)
    return batch.labels
