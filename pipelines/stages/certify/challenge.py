"""Attacks inside the certified threat model: what they leave standing bounds every certificate."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from components.attacks.gradients import attack_mode
from components.attacks.patch import attack_vote, hard_vote, rank_positions
from components.attacks.smoothed import attack_smoothed_l2
from components.certify.certificate import CERTIFICATES_NAME
from components.certify.l2.noise import predict_block
from components.certify.l2.predict import predict_counts
from components.certify.l2.settings import GaussianSettings, L2ChallengeSettings
from components.certify.patch.double_masking import certify_pairs
from components.certify.patch.early_stop import UNSEEN
from components.certify.patch.settings import AblationSettings, PatchSettings
from components.certify.settings import CertificateSettings
from components.certify.votes import Votes
from components.core.seeding import generator_for
from components.core.settings import plain
from components.core.threats import UNIT, PatchThreat, describe
from components.core.types import LogitsFn
from components.core.units import Unit, WorkFn
from components.denoising.classifier import DenoisedClassifier
from components.evaluate.accuracy import accuracy
from components.models.masked_votes import Masks
from pipelines.recipe.schema.recipe import Recipe
from pipelines.runtime.artifacts import StageDir
from pipelines.runtime.parts import PartStore
from pipelines.runtime.shards import run_units
from pipelines.stages.certify.worker import (
    AblationVoter,
    PairVoter,
    VoteConfig,
    load_items,
    load_noisy_model,
)

SCHEMA = pa.schema(
    [
        ("item_id", pa.string()),
        ("adversarial_prediction", pa.int32()),
        ("num_evaluations", pa.int32()),
        ("norm", pa.float64()),
    ]
)


@dataclass(frozen=True, slots=True)
class Target:
    """One item to attack: its place in the test split, its claimed class and its clean votes."""

    item: int
    prediction: int
    votes: tuple[int, ...]  # of ablations or pairs; empty for noise


class PatchChallenger:
    """Adaptive patch attack on the classifier that was certified: votes, or pairs of masks."""

    def __init__(self, config: VoteConfig) -> None:
        self.config, self.items = config, load_items(config)
        self.voter: AblationVoter | PairVoter
        self.masks: Masks
        if isinstance(config.section, AblationSettings):
            self.voter = AblationVoter(config)
            self.masks = self.voter.ablations
        else:
            self.voter = PairVoter(config)
            self.masks = self.voter.visible
        self.model = self.voter.model

    def __call__(self, target: Target) -> pa.Table:
        section = self.config.section
        assert isinstance(section, PatchSettings)
        assert section.challenge is not None
        c, item = section.challenge, self.items.span(target.item, target.item + 1)
        item_id, image = item.item_ids[0], item.pixels()[0].to(self.config.device)
        votes = torch.tensor(target.votes)
        if (votes == UNSEEN).any():  # voting stopped early; the attack needs them all
            votes = self._votes(image)
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
                step_size=0.1,
                positions=positions,
                generator=generator_for(self.config.seed, "patch", item_id),
                micro_batch=section.micro_batch,
                decide=self._decide,
            )
        # The attack saw other batch shapes; only a recount as in certification is a verdict.
        verdict = self._decide(self._votes(result.x_adv))
        return _row(item_id, verdict, result.num_evaluations, float(c.patch_size))

    def _votes(self, image: torch.Tensor) -> torch.Tensor:
        """All votes, as certification asks for them."""
        if isinstance(self.voter, PairVoter):
            return torch.from_numpy(self.voter.votes(image[None]).astype(np.int64))
        return self.voter.ask(image[None])[0]

    def _decide(self, votes: torch.Tensor) -> int:
        """What the deployed classifier makes of the votes."""
        if isinstance(self.voter, AblationVoter):
            return hard_vote(votes)
        classes, masks = self.model.spec.num_classes, self.voter.masks
        return int(certify_pairs(votes[None].numpy(), masks, num_classes=classes).prediction[0])


class L2Challenger:
    """SmoothAdv on the soft vote, judged by PREDICT on fresh draws."""

    def __init__(self, config: VoteConfig) -> None:
        self.config, self.items = config, load_items(config)
        self.model = load_noisy_model(config)

    def __call__(self, target: Target) -> pa.Table:
        section = self.config.section
        assert isinstance(section, GaussianSettings)
        assert section.challenge is not None
        c, item = section.challenge, self.items.span(target.item, target.item + 1)
        item_id, image, seed = item.item_ids[0], item.pixels()[0], self.config.seed
        generator = generator_for(seed, "smoothed", item_id)
        with attack_mode(self.model):
            x_adv = attack_smoothed_l2(
                self._logits_of(generator),
                image.to(self.config.device),
                target.prediction,
                eps=c.eps,
                sigma=section.sigma,
                num_steps=c.num_steps,
                num_draws=c.num_draws,
                step_size=2.5 * c.eps / c.num_steps,
                generator=generator,
            ).cpu()
        predictions = predict_block(
            self.model,
            x_adv,
            sigma=section.sigma,
            run_seed=seed,
            stream="challenge",
            item_id=item_id,
            start=0,
            stop=c.num_predict,
            micro_batch=section.micro_batch,
            device=self.config.device,
        )
        counts = np.bincount(predictions, minlength=self.model.spec.num_classes)
        verdict = predict_counts(
            counts, alpha=section.failure_prob
        )  # -1: the vote is too close to call
        norm = float((x_adv.double() - image.double()).norm())
        return _row(item_id, verdict, c.num_steps * c.num_draws + c.num_predict, norm)

    def _logits_of(self, generator: torch.Generator) -> LogitsFn:
        """The classifier under noise; a denoiser that draws is given fresh normals every time."""
        model = self.model
        if not isinstance(model, DenoisedClassifier):
            return model
        return lambda noisy: model(
            noisy, lambda step: torch.randn(noisy.shape, generator=generator)
        )


def make_challenger(config: VoteConfig) -> WorkFn:
    gaussian = isinstance(config.section, GaussianSettings)
    return L2Challenger(config) if gaussian else PatchChallenger(config)


def run(recipe: Recipe, config: VoteConfig, votes: Votes, out: StageDir) -> dict[str, Any]:
    """Attack the first items of the certificate and compare claim and outcome on those items."""
    section = config.section
    assert section.challenge is not None
    claims = {
        row["item_id"]: row for row in pq.read_table(out.path / CERTIFICATES_NAME).to_pylist()
    }
    clean = (
        {}
        if isinstance(section, GaussianSettings)
        else {item.item_id: next(iter(item.streams.values())) for item in votes.items()}
    )
    order = load_items(config).take(min(section.challenge.num_items, len(claims))).item_ids
    units = [
        Unit(
            f"item-{i:08d}",
            f"item {item_id}",
            Target(
                i,
                claims[item_id]["prediction"],
                tuple(clean[item_id].tolist()) if clean else (),
            ),
        )
        for i, item_id in enumerate(order)
        if not claims[item_id]["abstain"]  # nothing was claimed: nothing to attack
    ]
    parts = PartStore(out.scratch / "challenge", run_id=votes.sha256)
    run_units(
        units,
        make=make_challenger,
        config=config,
        parts=parts,
        cluster=recipe.cluster,
        label=f"{out.step} challenge",
    )
    rows = [row for table in parts.tables([u.name for u in units]) for row in table.to_pylist()]
    after = {row["item_id"]: row["adversarial_prediction"] for row in rows}
    return _compare(section, [claims[item_id] for item_id in order], after)


def _compare(
    section: CertificateSettings, claims: list[dict[str, Any]], after: dict[str, int]
) -> dict[str, Any]:
    """Accuracies of claim and attack on the same items; an undecided vote (-1) stands."""
    certified, standing, broken = [], [], []
    for claim in claims:
        safe = _is_certified(section, claim)
        claimed = safe or _is_certified(section, claim, second=True)
        verdict = after.get(claim["item_id"], -1)
        fell = verdict not in (-1, claim["prediction"])
        certified.append(bool(claim["correct"] and safe))
        standing.append(bool(claim["correct"] and not fell))
        if claimed and fell:
            broken.append(claim["item_id"])
    assert section.challenge is not None
    return {
        **_describe(section),
        "settings": plain(section.challenge),
        "num_items": len(claims),
        "certified": accuracy(np.array(certified)),
        "standing": accuracy(np.array(standing)),
        "broken_certified": len(broken),
        "broken_items": broken,
    }


def _describe(section: CertificateSettings) -> dict[str, Any]:
    """The attack and the one budget it used."""
    if isinstance(section, PatchSettings):
        assert section.challenge is not None
        threat = describe(PatchThreat((section.challenge.patch_size,)))
        return {"attack": "adaptive patch attack", "threat": threat}
    assert isinstance(section.challenge, L2ChallengeSettings)
    threat = {"kind": "l2", "unit": UNIT, "eps": section.challenge.eps}
    return {"attack": "SmoothAdv l2 attack", "threat": threat}


def _is_certified(
    section: CertificateSettings, claim: dict[str, Any], *, second: bool = False
) -> bool:
    """Whether the claim covers the attack's budget; `second`: under the second rule, if any."""
    if isinstance(section, PatchSettings):
        assert section.challenge is not None
        column = "certified_patch_sizes_loc" if second else "certified_patch_sizes"
        return section.challenge.patch_size in claim.get(column, [])
    assert isinstance(section.challenge, L2ChallengeSettings)
    return bool(not claim["abstain"] and claim["radius"] >= section.challenge.eps)


def _row(item_id: str, prediction: int, num_evaluations: int, norm: float) -> pa.Table:
    return pa.Table.from_pylist(
        [
            {
                "item_id": item_id,
                "adversarial_prediction": prediction,
                "num_evaluations": num_evaluations,
                "norm": norm,
            }
        ],
        schema=SCHEMA,
    )
