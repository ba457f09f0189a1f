"""Adversarial training: few FGSM steps, epsilon warmed up (Debenedetti et al. 2022, sec. 4)."""

from dataclasses import dataclass

from torch import nn

from components.attacks.fgsm import fgsm
from components.attacks.gradients import attack_mode
from components.attacks.starts import random_starts
from components.core.types import Logits
from components.train.objectives.base import Batch, LossOut, cross_entropy
from components.train.schedules import epsilon_at


@dataclass(frozen=True, slots=True)
class FgsmTraining:
    """Cross-entropy on adversarial images only (Madry et al. 2018, eq. 2.1).

    Neither smoothing nor mixing of labels enters the attack: it ascends the plain cross-entropy of
    the hard labels, for a mixed image those of its larger part.
    """

    eps: float
    num_steps: int = 1
    eps_warmup_epochs: int = 0
    label_smoothing: float = 0.0

    def eps_at(self, epoch: int) -> float:
        return epsilon_at(epoch, final=self.eps, warmup_epochs=self.eps_warmup_epochs)

    def loss(self, wrapped: nn.Module, bare: nn.Module, batch: Batch) -> LossOut:
        images = batch.images
        if eps := self.eps_at(batch.epoch):  # during a warm-up the first epoch is clean
            starts = random_starts(
                batch.item_ids,
                tuple(images.shape[1:]),
                run_seed=batch.seed,
                stream=f"fgsm-{batch.epoch}",
            )
            with attack_mode(bare):
                images = fgsm(
                    bare,
                    images,
                    batch.hard_labels,
                    eps=eps,
                    num_steps=self.num_steps,
                    step_size=1.5 * self.eps / self.num_steps,
                    starts=starts.to(images.device),
                )
        logits = wrapped(images)
        loss = cross_entropy(logits, batch, label_smoothing=self.label_smoothing)
        return LossOut(loss, logits.detach())

    def validation_logits(self, bare: nn.Module, batch: Batch) -> Logits:
        logits: Logits = bare(batch.images)
        return logits
