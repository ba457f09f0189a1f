"""Adaptive patch attacks on the certified classifier: votes over ablations or pairs of masks."""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from components.attacks.gradients import attack_mode
from components.attacks.patch import attack_vote, hard_vote, rank_positions
from components.certify.challenge import ChallengeTask, Target, challenge_row
from components.certify.patch.double_masking import certify_pairs
from components.certify.patch.early_stop import UNSEEN
from components.certify.patch.settings import PatchChallengeSettings
from components.certify.patch.voters import AblationVoter, PairVoter
from components.core.seeding import generator_for

STEP_SIZE = 0.1
PatchTask = ChallengeTask[Any, PatchChallengeSettings, Any]


class PatchChallenger(ABC):
    """Attacks one item at a time; a subclass defines how votes are computed and decided."""

    voter: AblationVoter | PairVoter

    def __init__(self, challenge: PatchTask) -> None:
        self.challenge, self.votes = challenge.settings, challenge.task.votes
        self.seed, self.items = challenge.seed, challenge.task.items()
        self.voter = self.load_voter(challenge)
        self.model, self.masks = self.voter.model, self.voter.masks

    @abstractmethod
    def load_voter(self, challenge: PatchTask) -> AblationVoter | PairVoter:
        """The voter of the certificate."""

    @abstractmethod
    def all_votes(self, image: Tensor) -> Tensor:
        """All votes of a (C, H, W) image, computed as in certification."""

    @abstractmethod
    def decide(self, votes: Tensor) -> int:
        """The prediction of the deployed classifier from these votes."""

    def __call__(self, target: Target) -> pa.Table:
        c, item = self.challenge, self.items.span(target.item, target.item + 1)
        item_id, image = item.item_ids[0], item.pixels()[0].to(self.votes.device)
        votes = torch.tensor(target.votes)
        if (votes == UNSEEN).any():  # voting stopped early; the attack needs all votes
            votes = self.all_votes(image)
        positions = rank_positions(
            votes,
            self.masks,
            winner=target.prediction,
            patch=c.patch_size,
            num_positions=c.num_positions,
        )
        with attack_mode(self.model):
            result = attack_vote(
                self.model,
                image,
                target.prediction,
                votes,
                self.masks,
                patch=c.patch_size,
                num_steps=c.num_steps,
                step_size=STEP_SIZE,
                positions=positions,
                generator=generator_for(self.seed, "patch", item_id),
                micro_batch=self.votes.micro_batch,
                decide=self.decide,
            )
        # The attack used other batch shapes, so the verdict needs a recount as in certification.
        verdict = self.decide(self.all_votes(result.x_adv))
        return challenge_row(item_id, verdict, result.num_evaluations, float(c.patch_size))


class AblationChallenger(PatchChallenger):
    """Attack on the majority vote over ablations."""

    voter: AblationVoter

    def load_voter(self, challenge: PatchTask) -> AblationVoter:
        return AblationVoter(challenge.task)

    def all_votes(self, image: Tensor) -> Tensor:
        return self.voter.predict(image[None])[0]

    def decide(self, votes: Tensor) -> int:
        return hard_vote(votes)


class PairChallenger(PatchChallenger):
    """Attack on the procedure of double masking."""

    voter: PairVoter

    def load_voter(self, challenge: PatchTask) -> PairVoter:
        return PairVoter(challenge.task)

    def all_votes(self, image: Tensor) -> Tensor:
        return torch.from_numpy(self.voter.votes(image[None]).astype(np.int64))

    def decide(self, votes: Tensor) -> int:
        classes, masks = self.model.spec.num_classes, self.voter.mask_set
        return int(certify_pairs(votes[None].numpy(), masks, num_classes=classes).prediction[0])
