"""Certificates, and the attacks that try to refute them."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from components.certify.l2.reach import LEAST_UNIFORM, Method, draws_to_reach, reach
from pipelines.recipe.schema.base import Count, PositivePixels, Section
from pipelines.recipe.schema.denoise import DenoiserName, HeunSampler, OneShotSampler, Sampler


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


class SweepSection(Section):
    """Test-time ablation sizes and strides of one trained model (Salman et al. 2022, Table 8).

    Every pair is a certificate with votes of its own, called `<section>-b<size>-s<stride>`. A list
    that is left out stays at the section's own value.
    """

    band: list[Count] = Field(default=[])
    stride: list[Count] = Field(default=[])

    @model_validator(mode="after")
    def _sweeps_something(self) -> Self:
        if not self.band and not self.stride:
            raise PydanticCustomError("model", "sweep: list values of band, of stride, or of both")
        for name in ("band", "stride"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise PydanticCustomError(
                    "model",
                    "sweep.{name}: {values} lists a value twice; keep one",
                    {"name": name, "values": str(values)},
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
    # How votes are computed: faster where the hardware has units for 16 bits, or for long runs.
    # Votes that such rounding could have decided are taken again in float32.
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    compiled: bool = False
    sweep: SweepSection | None = None

    @model_validator(mode="after")
    def _sweep_is_not_overruled(self) -> Self:
        for name, default in (("band", None), ("stride", 1)):
            if self.sweep and getattr(self.sweep, name) and getattr(self, name) != default:
                raise PydanticCustomError(
                    "model",
                    "{name}: {value} would be ignored, because sweep.{name} lists values",
                    {"name": name, "value": getattr(self, name)},
                )
        return self

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


USUAL_RADII = [0.25, 0.5, 0.75, 1.0]
ROUNDING = 1e-9  # closed forms may be off by the last digits; the stage decides those exactly


def _usual_radii(given: dict[str, Any]) -> list[float]:
    """The radii of published tables as far as these draws reach."""
    keys = {"sigma": "sigma", "num_estimate": "n", "failure_prob": "alpha", "method": "method"}
    if not keys.keys() <= given.keys():  # one of them is refused anyway
        return USUAL_RADII
    most = reach(**{name: given[key] for key, name in keys.items()})
    return [radius for radius in USUAL_RADII if radius <= most] or USUAL_RADII[:1]


class GaussianCertify(Section):
    """Randomized smoothing; defaults are the setting of Cohen et al. 2019, sec. 4."""

    kind: Literal["gaussian"]
    model: str = "main"
    denoiser: DenoiserName | None = None  # a variant of this recipe, diffusers:PATH or model:PATH
    sampler: Sampler = OneShotSampler()  # how it denoises
    sigma: PositivePixels
    # `sequential`: an item is drawn until its radii are decided, at most `num_estimate` times;
    # `randomized`: the randomised bound, slightly larger radii from as many draws as `fixed`.
    method: Method = "fixed"
    num_select: Count = 100  # n0
    num_estimate: Count = 100_000  # n
    failure_prob: float = Field(default=0.001, gt=0, lt=1)  # alpha
    # Declared before the first draw. With `sequential`, radius 0 asks for a label at any distance.
    radii: list[Annotated[float, Field(ge=0)]] = Field(default_factory=_usual_radii, min_length=1)
    look_every: Count = 64  # draws between looks (sequential)
    futility_prob: float = Field(default=0.01, gt=0, lt=0.3)  # of giving up wrongly (sequential)
    block_size: Count = 1_000  # draws per unit of work, at most
    micro_batch: Count = 100
    num_items: Count | None = None
    challenge: L2Challenge | None = None

    @property
    def reach(self) -> float:
        """The largest radius that this many draws can certify."""
        return reach(
            sigma=self.sigma, n=self.num_estimate, alpha=self.failure_prob, method=self.method
        )

    @model_validator(mode="after")
    def _method_fits(self) -> Self:
        for name in ("look_every", "futility_prob"):
            value = getattr(self, name)
            if self.method != "sequential" and value != type(self).model_fields[name].default:
                raise _refusal("{name}: {value} applies to method sequential only", name, value)
        limit = {"fixed": 1.0, "randomized": LEAST_UNIFORM, "sequential": 0.3}[self.method]
        if self.failure_prob >= limit:
            text = (
                f"{{name}}: {{value}} is too large: method {self.method} needs less than {limit:g}"
            )
            raise _refusal(text, "failure_prob", self.failure_prob)
        if self.method != "sequential" and 0 in self.radii:
            raise _refusal("{name}: {value} is no distance; leave it out", "radii", 0)
        return self

    @model_validator(mode="after")
    def _sampler_has_a_denoiser(self) -> Self:
        if self.denoiser is None and self.sampler != OneShotSampler():
            raise PydanticCustomError(
                "model",
                "sampler: {kind} denoises with nothing; name a denoiser",
                {"kind": self.sampler.kind},
            )
        if isinstance(self.sampler, HeunSampler) and self.sampler.last >= 2 * self.sigma:
            text = f"{{name}}: {{value}} is not below {2 * self.sigma:g}, the level of sigma"
            raise _refusal(text, "sampler.last", self.sampler.last)
        return self

    @model_validator(mode="after")
    def _can_ever_certify(self) -> Self:
        if self.reach == 0:  # even draws that all agree leave the bound at 1/2 or below
            tiny = self.sigma * ROUNDING
            needed = draws_to_reach(
                tiny, sigma=self.sigma, alpha=self.failure_prob, method=self.method
            )
            raised = f"num_estimate to {needed} or failure_prob" if needed else "failure_prob"
            raise PydanticCustomError(
                "hopeless",
                "num_estimate: {n} draws with failure_prob {alpha} can never certify anything; "
                "raise {raised}",
                {"n": self.num_estimate, "alpha": self.failure_prob, "raised": raised},
            )
        for radius in self.radii:
            if radius > self.reach * (1 + ROUNDING):
                self._refuse_radius(radius)
        if self.block_size % self.micro_batch:
            raise PydanticCustomError(
                "blocks",
                "block_size: {size} is not a multiple of micro_batch {micro}",
                {"size": self.block_size, "micro": self.micro_batch},
            )
        return self

    @model_validator(mode="after")
    def _challenge_can_break(self) -> Self:
        # PREDICT of unanimous draws has the p-value 2 / 2^n (Cohen et al. 2019, sec. 3.2).
        if self.challenge and 2 * 0.5**self.challenge.num_predict > self.failure_prob:
            text = (
                "{name}: {value} draws can never show a lead at failure_prob "
                f"{self.failure_prob:g}: the challenge would pass whatever it finds"
            )
            raise _refusal(text, "challenge.num_predict", self.challenge.num_predict)
        return self

    def _refuse_radius(self, radius: float) -> None:
        """Before any draw: no votes whatever could certify it."""
        needed = draws_to_reach(
            radius, sigma=self.sigma, alpha=self.failure_prob, method=self.method
        )
        remedy = f"raise num_estimate to {needed} or" if needed else "raise sigma or"
        text = (
            "radii: {radius} is above {reach}, the most that {n} draws of sigma {sigma} certify; "
            "{remedy} drop it"
        )
        raise PydanticCustomError(
            "hopeless",
            text,
            {
                "radius": f"{radius:g}",
                "reach": f"{self.reach:.4f}",
                "n": self.num_estimate,
                "sigma": f"{self.sigma:g}",
                "remedy": remedy,
            },
        )


def _refusal(text: str, name: str, value: object) -> PydanticCustomError:
    return PydanticCustomError("model", text, {"name": name, "value": value})  # type: ignore[arg-type]


Certify = Annotated[
    AblationCertify | DoubleMaskingCertify | GaussianCertify, Field(discriminator="kind")
]


@dataclass(frozen=True, slots=True)
class CertifyEntry:
    """One certificate of a recipe; `finer` is the entry whose votes hold all that it needs."""

    section: Certify
    finer: str | None = None


def certify_entries(name: str, section: Certify) -> dict[str, CertifyEntry]:
    """The certificates of a section by name: itself, or one for each size and stride of its sweep.

    Ablations start at all multiples of the stride, so those of stride s are among those of every
    stride that divides s: the smallest such one votes, the others take their part of its votes.
    Votes that stop early are no longer all there, so then every entry votes by itself.
    """
    sweep = section.sweep if isinstance(section, AblationCertify) else None
    if sweep is None:
        return {name: CertifyEntry(section)}
    assert isinstance(section, AblationCertify)
    strides = sorted(sweep.stride) or [section.stride]
    bands: list[int | None] = [*sorted(sweep.band)] or [section.band]
    entries = {}
    for band in bands:
        names = {stride: _entry_name(name, sweep, band=band, stride=stride) for stride in strides}
        for stride in strides:
            own = section.model_copy(update={"band": band, "stride": stride, "sweep": None})
            finest = next(s for s in strides if stride % s == 0)
            alone = finest == stride or section.stop_early
            entries[names[stride]] = CertifyEntry(own, None if alone else names[finest])
    return entries


def _entry_name(name: str, sweep: SweepSection, *, band: int | None, stride: int) -> str:
    swept = [f"b{band}"] * bool(sweep.band) + [f"s{stride}"] * bool(sweep.stride)
    return "-".join([name, *swept])
