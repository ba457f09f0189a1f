"""SmoothAdv (Salman et al. 2019) on the smoothed classifier, judged by PREDICT on fresh draws."""

import numpy as np
import pyarrow as pa
import torch

from components.attacks.gradients import attack_mode
from components.attacks.smoothed import attack_smoothed_l2
from components.certify.challenge import ChallengeTask, Target, challenge_row
from components.certify.l2.noise import predict_block
from components.certify.l2.predict import predict_counts
from components.certify.l2.settings import GaussianClaimSettings, L2ChallengeSettings
from components.certify.l2.voters import GaussianVoteSettings, load_noisy_model
from components.core.seeding import DrawSpan, generator_for
from components.core.types import LogitsFn
from components.denoising.classifier import DenoisedClassifier

L2Task = ChallengeTask[GaussianVoteSettings, L2ChallengeSettings, GaussianClaimSettings]


class L2Challenger:
    """Attacks the soft vote, one item at a time."""

    def __init__(self, challenge: L2Task) -> None:
        self.challenge, self.votes = challenge.settings, challenge.task.votes
        self.failure_prob, self.seed = challenge.claim.failure_prob, challenge.seed
        self.items, self.model = challenge.task.items(), load_noisy_model(challenge.task)

    def __call__(self, target: Target) -> pa.Table:
        c, votes, seed = self.challenge, self.votes, self.seed
        item = self.items.span(target.item, target.item + 1)
        item_id, image = item.item_ids[0], item.pixels()[0]
        generator = generator_for(seed, "smoothed", item_id)
        with attack_mode(self.model):
            x_adv = attack_smoothed_l2(
                self._logits_of(generator),
                image.to(votes.device),
                target.prediction,
                eps=c.eps,
                sigma=votes.sigma,
                num_steps=c.num_steps,
                num_draws=c.num_draws,
                step_size=2.5 * c.eps / c.num_steps,
                generator=generator,
            ).cpu()
        predictions = predict_block(
            self.model,
            x_adv,
            DrawSpan(seed, "challenge", item_id, 0, c.num_predict),
            sigma=votes.sigma,
            micro_batch=votes.micro_batch,
            device=votes.device,
            noise=votes.noise,
            precision=votes.precision,
        )
        counts = np.bincount(predictions, minlength=self.model.spec.num_classes)
        verdict = predict_counts(counts, alpha=self.failure_prob)  # -1: too close to call
        norm = float((x_adv.double() - image.double()).norm())
        return challenge_row(item_id, verdict, c.num_steps * c.num_draws + c.num_predict, norm)

    def _logits_of(self, generator: torch.Generator) -> LogitsFn:
        """Logits of noisy images; a denoiser that samples gets fresh normals at every call."""
        model = self.model
        if not isinstance(model, DenoisedClassifier):
            return model
        return lambda noisy: model(
            noisy, lambda step: torch.randn(noisy.shape, generator=generator)
        )
