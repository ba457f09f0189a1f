"""Certificates, and the attacks that try to refute them."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from pipelines.sections.base import Count, PositivePixels, Section
from pipelines.sections.denoise import DenoiserName, OneShotSampler, Sampler


class PatchChallenge(Section):
    """An adaptive patch attack on some items: a certified one that falls fails the stage."""

    patch_size: Count
    num_items: Count = 20
    num_steps: Count = 20
    num_positions: Count = 4


class PatchCertify(Section):
    """What all certificates against one square patch share."""

    kind: str
    model: str = "main"
    patch_sizes: list[Count] = Field(min_length=1)
    # What happens to hidden tokens. A model trained one way and certified the other loses many
    # points, so that has to be asked for twice.
    token_policy: Literal["as_trained", "drop", "mask"] = "as_trained"
    allow_token_mismatch: bool = False
    num_items: Count | None = None
    micro_batch: Count = 64
    challenge: PatchChallenge | None = None

    @model_validator(mode="after")
    def _challenge_is_claimed(self) -> Self:
        if self.challenge and self.challenge.patch_size not in self.patch_sizes:
            raise PydanticCustomError(
                "model",
                "challenge.patch_size: {size} is not among the claimed patch_sizes {claimed}",
                {"size": self.challenge.patch_size, "claimed": str(self.patch_sizes)},
            )
        return self


class AblationCertify(PatchCertify):
    """Patch certificates from votes over ablations (Levine & Feizi 2020, Salman et al. 2022)."""

    kind: Literal["columns", "rows", "blocks", "both"]
    band: Count | None = None  # None: the width the model was trained with
    stride: Count = 1
    rule: Literal["strict", "count", "loc"] = "count"
    second_rule: Literal["none", "loc"] = "none"
    delta_rule: Literal["exact", "paper_reference"] = "exact"
    stop_early: bool = False  # votes then answer these sizes and rules, and no others

    @model_validator(mode="after")
    def _rules_fit(self) -> Self:
        if self.second_rule == self.rule:
            raise PydanticCustomError("model", "second_rule: {rule} is the rule already", _of(self))
        if self.rule == "loc" and self.delta_rule != "exact":
            raise PydanticCustomError(
                "model", "delta_rule: {delta} does not apply to rule loc, which counts", _of(self)
            )
        if self.stop_early and self.delta_rule != "exact":
            raise PydanticCustomError(
                "model", "delta_rule: {delta} needs all votes; leave out stop_early", _of(self)
            )
        return self


def _of(section: AblationCertify) -> dict[str, str]:
    return {"rule": section.rule, "delta": section.delta_rule}


class DoubleMaskingCertify(PatchCertify):
    """Patch certificates by pairs of masks, for a patch of known size (Xiang et al. 2022)."""

    kind: Literal["double_masking"]
    mask_patch: Count  # the largest patch that the masks hide
    num_masks: Annotated[int, Field(ge=2)] = 6  # per side

    @model_validator(mode="after")
    def _masks_hide_the_patches(self) -> Self:
        if max(self.patch_sizes) > self.mask_patch:
            raise PydanticCustomError(
                "model",
                "patch_sizes: {size} is larger than mask_patch {limit}, which the masks hide",
                {"size": max(self.patch_sizes), "limit": self.mask_patch},
            )
        return self


class L2Challenge(Section):
    """An l2 attack on the smoothed classifier; a certified item that falls fails the stage."""

    eps: float = Field(gt=0)
    num_items: Count = 20
    num_steps: Count = 10
    num_draws: Count = 16
    num_predict: Count = 1000


class GaussianCertify(Section):
    """Randomized smoothing; defaults are the setting of Cohen et al. 2019, sec. 4."""

    kind: Literal["gaussian"]
    model: str = "main"
    denoiser: DenoiserName | None = None  # a variant of this recipe, diffusers:PATH or model:PATH
    sampler: Sampler = OneShotSampler()  # how it denoises
    sigma: PositivePixels
    num_select: Count = 100  # n0
    num_estimate: Count = 100_000  # n
    failure_prob: float = Field(default=0.001, gt=0, lt=1)  # alpha
    radii: list[Annotated[float, Field(gt=0)]] = Field(default=[0.25, 0.5, 0.75, 1.0], min_length=1)
    block_size: Count = 1_000  # draws per unit of work
    micro_batch: Count = 100
    num_items: Count | None = None
    challenge: L2Challenge | None = None

    @model_validator(mode="after")
    def _sampler_has_a_denoiser(self) -> Self:
        if self.denoiser is None and self.sampler != OneShotSampler():
            raise PydanticCustomError(
                "model",
                "sampler: {kind} denoises with nothing; name a denoiser",
                {"kind": self.sampler.kind},
            )
        return self

    @model_validator(mode="after")
    def _can_ever_certify(self) -> Self:
        # With k = n the Clopper-Pearson bound is alpha^(1/n); at 1/2 or less every item abstains.
        if self.failure_prob ** (1 / self.num_estimate) <= 0.5:
            raise PydanticCustomError(
                "hopeless",
                "num_estimate: {n} draws with failure_prob {alpha} can never certify anything; "
                "raise num_estimate above log2(1/failure_prob) or raise failure_prob",
                {"n": self.num_estimate, "alpha": self.failure_prob},
            )
        if self.block_size % self.micro_batch:
            raise PydanticCustomError(
                "blocks",
                "block_size: {size} is not a multiple of micro_batch {micro}",
                {"size": self.block_size, "micro": self.micro_batch},
            )
        return self


Certify = Annotated[
    AblationCertify | DoubleMaskingCertify | GaussianCertify, Field(discriminator="kind")
]
