"""TRADES: cross-entropy on clean images plus divergence of the predictions on attacked ones.

Zhang et al. 2019, "Theoretically principled trade-off between robustness and accuracy", eq. 5:
CE(z(x), y) + beta KL(p(x) || p(x')), where x' maximises the divergence inside the ball.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from components.attacks.losses import kl_divergence
from components.core.types import Images, Logits
from components.train.objectives.base import Batch, LossOut, cross_entropy
from components.train.objectives.inner import (
    AdversarialObjective,
    has_batch_statistics,
    under_attack,
)
from components.train.objectives.settings import TradesSettings


class Trades(AdversarialObjective):
    """Gradients flow through both sides of the divergence, as in the published code.

    Clean and adversarial images share one pass (`joint`) or have one each (`separate`), which
    `auto` chooses for networks with batch normalisation: one pass would normalise both with the
    statistics of their mixture.
    """

    settings: TradesSettings

    def craft(self, bare: nn.Module, batch: Batch) -> Images:
        if self.attack.eps_of(batch) == 0:
            return batch.images
        with under_attack(bare), torch.no_grad():
            reference = bare(batch.images).softmax(dim=1)
        return self.attack(bare, batch, reference, kl_divergence)

    def outer_loss(
        self, wrapped: nn.Module, bare: nn.Module, batch: Batch, x_adv: Images
    ) -> LossOut:
        if x_adv is batch.images:  # eps 0: any difference would come from dropout
            logits = wrapped(batch.images)
            loss = cross_entropy(logits, batch, label_smoothing=self.label_smoothing)
            return LossOut(loss, logits.detach(), logits.detach())
        passes = self.settings.passes
        logits, adversarial = both_logits(wrapped, bare, batch.images, x_adv, passes=passes)
        natural = cross_entropy(logits, batch, label_smoothing=self.label_smoothing)
        divergence = item_divergences(logits, adversarial).mean()
        metrics = {"divergence": divergence.detach().double()}
        loss = natural + self.settings.beta * divergence
        return LossOut(loss, logits.detach(), adversarial.detach(), metrics)


def both_logits(
    wrapped: nn.Module, bare: nn.Module, x: Images, x_adv: Images, *, passes: str
) -> tuple[Logits, Logits]:
    """Logits of clean and adversarial images; only one pass synchronises workers.

    One is enough: a parameter's gradient is complete, from both passes, before it is sent.
    """
    if passes == "separate" or (passes == "auto" and has_batch_statistics(bare)):
        return wrapped(x), bare(x_adv)
    logits, adversarial = wrapped(torch.cat([x, x_adv])).chunk(2)
    return logits, adversarial


def item_divergences(logits: Logits, adversarial: Logits) -> Tensor:
    """(B,) KL(p || p_adv), differentiable in both; from finite log-probabilities."""
    log_p, log_adv = logits.log_softmax(dim=1), adversarial.log_softmax(dim=1)
    return F.kl_div(log_adv, log_p, reduction="none", log_target=True).sum(dim=1)
