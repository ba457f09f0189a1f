"""Adversarial training: cross-entropy on adversarial images alone (Madry et al. 2018, eq. 2.1).

One or two large steps (`fgsm`) are the recipe of Debenedetti et al. 2023, sec. 4; ten small ones
(`pgd`) that of Madry et al. A single step can fail: the model learns to read the label from the
perturbation, and attacked images become easier than clean ones (Kurakin et al. 2017, sec. 4.3).
`probe` measures that, `leak.py` tests it.
"""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn import functional as F

from components.attacks.gradients import attack_mode
from components.core.types import Images, Labels
from components.train.objectives.base import Batch, LossOut, cross_entropy
from components.train.objectives.base_settings import AttackedSettings
from components.train.objectives.inner import AdversarialObjective, predictions
from components.train.objectives.leak import LeakDetector


class AdversarialTraining(AdversarialObjective):
    """Cross-entropy on the images of the training attack.

    A `hard` attack ascends the plain cross-entropy of the labels, for a mixed image those of its
    larger part: neither smoothing nor mixing enters it. A `soft` one ascends that of the mixed
    targets (Mo et al. 2022).

    Clean images are not part of the loss. `clean_forward` decides whether the model sees them:
    `none`; `no_grad_eval`, every `clean_every` steps to measure accuracy, without side effects;
    `train_stats`, at every step in training mode, so that running statistics mix clean and
    adversarial batches as in published runs.
    """

    settings: AttackedSettings

    def leak_detector(self) -> LeakDetector:
        return LeakDetector(num_steps=self.settings.num_steps)

    def craft(self, bare: nn.Module, batch: Batch) -> Images:
        soft = batch.targets if self.settings.attack_target == "soft" else None
        y = batch.hard_labels if soft is None else soft
        return self.attack(bare, batch, y, _item_losses)

    def outer_loss(
        self, wrapped: nn.Module, bare: nn.Module, batch: Batch, x_adv: Images
    ) -> LossOut:
        own = self.settings
        clean = predictions(bare, batch.images) if own.clean_forward == "train_stats" else None
        logits = wrapped(x_adv)
        loss = cross_entropy(logits, batch, label_smoothing=self.label_smoothing)
        metrics: Mapping[str, Tensor] = {}
        if clean is not None:
            metrics = leak_metrics(clean, logits.argmax(dim=1), batch.hard_labels)
        elif own.clean_forward == "no_grad_eval" and batch.step % own.clean_every == 0:
            metrics = probe(bare, batch, x_adv)
        return LossOut(loss, logits.detach(), logits.detach(), metrics)


def _item_losses(logits: Tensor, y: Tensor) -> Tensor:
    """(B,) cross-entropy with classes (B,) or with shares of classes (B, K)."""
    return F.cross_entropy(logits, y, reduction="none")


def probe(bare: nn.Module, batch: Batch, x_adv: Images) -> Mapping[str, Tensor]:
    """`leak_metrics` of a batch, both passes in eval mode: dropout must not count as an attack."""
    with attack_mode(bare):
        clean, attacked = predictions(bare, batch.images), predictions(bare, x_adv)
    return leak_metrics(clean, attacked, batch.hard_labels)


def leak_metrics(clean: Labels, attacked: Labels, y: Labels) -> Mapping[str, Tensor]:
    """Shares of the batch: correct when clean, correct only when attacked, only when clean.

    `leak`, the difference of the last two, is attacked minus clean accuracy.
    """
    before, after = clean == y, attacked == y
    rescued, broken = after & ~before, before & ~after
    shares = {"clean_accuracy": before, "rescued": rescued, "broken": broken}
    metrics = {name: hits.double().mean() for name, hits in shares.items()}
    return metrics | {"leak": metrics["rescued"] - metrics["broken"]}
