"""Settings of certificates against one square patch, and of the attack that challenges them."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, MinLen

from components.certify.settings import (
    FAMILIES,
    CertificateEntry,
    CertificateSettings,
    ChallengeSettings,
    ClaimSettings,
    MicroBatch,
    TrainedModel,
    Warned,
)
from components.core.settings import EAGER, FLOAT32, Count, Problem, Settings, default_of, settings

Rule = Literal["strict", "count", "loc"]
SecondRule = Literal["none", "loc"]
DeltaRule = Literal["exact", "paper_reference"]
PatchSizes = Annotated[tuple[Count, ...], MinLen(1)]
MAX_SWEPT = 2  # sizes, and strides, of a shrunk recipe


@settings
class PatchChallengeSettings(ChallengeSettings):
    """An adaptive patch attack on some items; a broken certified item fails the stage."""

    patch_size: Count
    """Side of the attacked square in pixels."""
    num_items: Count = 20
    """Items that are attacked, at most."""
    num_steps: Count = 20
    """Steps of the attack at each position."""
    num_positions: Count = 4
    """Patch positions of each item."""


@settings
class PatchSettings(CertificateSettings):
    """Base of the settings against one square patch."""

    smoke_caps: ClassVar[dict[str, int]] = {"num_positions": 2}
    pixel_fields: ClassVar[tuple[str, ...]] = ("patch_size", "patch_sizes")

    kind: str
    model: str = "main"
    """The recipe's model that votes."""
    patch_sizes: PatchSizes
    """Sides of the patch in pixels; one claim for each."""
    token_policy: Literal["as_trained", "drop", "mask"] = "as_trained"
    """Whether hidden tokens are dropped. Another policy than in training costs many points of
    accuracy."""
    allow_token_mismatch: bool = False
    """Certify with another token policy than in training."""
    num_items: Count | None = None
    """Number of test items, from the first; None: all."""
    micro_batch: MicroBatch = 64
    """Ablated images in one forward pass; `auto`: measured by the first worker, which then also
    gives units of work enough items to fill a pass."""
    challenge: PatchChallengeSettings | None = None
    """An attack with one patch; a certified item that it breaks fails the stage."""

    def problems(self) -> Iterator[Problem]:
        if self.challenge and self.challenge.patch_size not in self.patch_sizes:
            remedy = f"is not among the claimed patch_sizes {list(self.patch_sizes)}"
            yield Problem("challenge.patch_size", self.challenge.patch_size, remedy)

    def lengths(self) -> Iterator[tuple[str, int]]:
        yield "patch_sizes", max(self.patch_sizes)

    def model_problems(self, model: TrainedModel) -> Iterator[Problem]:
        known = self.allow_token_mismatch or self.token_policy in ("as_trained", model.token_policy)
        if not known:
            remedy = (
                f"is not the training policy of model {model.name} ({model.token_policy}) and "
                "lowers certified accuracy; add allow_token_mismatch: true to certify it anyway"
            )
            yield Problem("token_policy", self.token_policy, remedy)

    def warnings(self, trained: TrainedModel) -> Iterator[Warned]:
        if self.token_policy not in ("as_trained", trained.token_policy):
            text = f"{self.token_policy} differs from the training's {trained.token_policy}"
            yield Warned("token_policy", text)


@settings
class SweepSettings(Settings):
    """Ablation sizes and strides to test one trained model with (Salman et al. 2022, Table 8).

    Every pair is a certificate with its own votes, called `<section>-b<size>-s<stride>`. A list
    that is left out keeps the section's own value.
    """

    band: tuple[Count, ...] = ()
    """Values of band; empty: the one of the certificate."""
    stride: tuple[Count, ...] = ()
    """Values of stride; empty: the one of the certificate."""

    def problems(self) -> Iterator[Problem]:
        if not self.band and not self.stride:
            yield Problem("", "", "list values of band, of stride, or of both")
        for name, values in (("band", self.band), ("stride", self.stride)):
            if len(set(values)) < len(values):
                yield Problem(name, list(values), "lists a value twice; keep one")


@FAMILIES.register("components.certify.patch.family:AblationFamily")
@settings
class AblationSettings(PatchSettings):
    """Patch certificates from votes over ablations (Levine & Feizi 2020, Salman et al. 2022)."""

    pixel_fields: ClassVar[tuple[str, ...]] = (*PatchSettings.pixel_fields, "band", "stride")

    kind: Literal["columns", "rows", "blocks", "both"]  # type: ignore[assignment]
    band: Count | None = None
    """Visible pixels of an ablation; None: as the model was trained."""
    stride: Count = 1
    """Pixels between neighbouring ablations."""
    rule: Rule = "count"
    """`count`: the counting theorem; `loc`: every patch position by itself."""
    second_rule: SecondRule = "none"
    """Verdicts of another rule in a second column."""
    delta_rule: DeltaRule = "exact"
    """`paper_reference` reproduces published tables and is not sound."""
    stop_early: bool = False
    """Votes stop when these sizes and rules are decided; other claims cannot be derived."""
    precision: Literal["auto", "float32", "tf32", "bfloat16", "float16"] = FLOAT32
    """Precision of the forward passes. Votes within rounding error are repeated in float32, so
    certificates hold for the float32 classifier. `auto`: bfloat16 on GPUs that have it."""
    compiled: bool = EAGER
    """Use torch.compile; worthwhile in long runs."""
    sweep: SweepSettings | None = None
    """One certificate for every pair of band and stride, from one trained model."""

    def problems(self) -> Iterator[Problem]:
        yield from PatchSettings.problems(self)
        for name in ("band", "stride") if self.sweep else ():
            value, default = getattr(self, name), default_of(AblationSettings, name)
            if getattr(self.sweep, name) and value != default:
                yield Problem(name, value, f"would be ignored, because sweep.{name} lists values")
        if self.second_rule == self.rule:
            yield Problem("second_rule", self.rule, "is already the rule; choose another or none")
        if self.rule == "loc" and self.delta_rule != "exact":
            yield Problem("delta_rule", self.delta_rule, "does not apply to rule loc; leave it out")
        if self.stop_early and self.delta_rule != "exact":
            yield Problem("delta_rule", self.delta_rule, "needs all votes; leave out stop_early")

    def lengths(self) -> Iterator[tuple[str, int]]:
        yield from PatchSettings.lengths(self)
        yield "band", self.band or 0  # None: as trained, so it fits
        yield "stride", self.stride
        if self.sweep:
            yield "sweep.band", max(self.sweep.band, default=0)
            yield "sweep.stride", max(self.sweep.stride, default=0)

    def model_problems(self, model: TrainedModel) -> Iterator[Problem]:
        yield from PatchSettings.model_problems(self, model)
        swept = self.sweep is not None and bool(self.sweep.band)
        shape, _ = model.ablation or (None, 0)
        if self.band is None and not swept and shape != self.kind:
            remedy = f"is needed: model {model.name} was not trained on {self.kind}"
            yield Problem("band", "", remedy)

    def device_problems(self, device: str) -> Iterator[Problem]:
        # Whether bfloat16 is fast depends on the processor, which only a worker knows.
        if device == "cpu" and self.precision in ("float16", "tf32"):
            remedy = "needs GPUs; set cluster.gpus_per_actor, or use float32"
            yield Problem("precision", self.precision, remedy)

    def max_votes(self, *, side: int) -> int:
        starts = -(-side // min(self.strides))  # along a side
        return starts * (starts if self.kind == "blocks" else 2)

    def recorded(self, *, run_seed: int) -> dict[str, object]:
        """The band of training is not known yet; the number of votes does not depend on it."""
        return {**PatchSettings.recorded(self, run_seed=run_seed), "band": self.band or 1}

    @property
    def strides(self) -> tuple[int, ...]:
        """All strides of the section, swept or not."""
        return (self.sweep.stride if self.sweep else ()) or (self.stride,)

    @property
    def rules(self) -> tuple[str, ...]:
        """The rules under which the certificate gives verdicts."""
        return (self.rule,) if self.second_rule == "none" else (self.rule, self.second_rule)

    def warnings(self, trained: TrainedModel) -> Iterator[Warned]:
        shape, size = trained.ablation or (None, None)
        if shape != self.kind:
            bands = "column bands" if self.kind == "columns" else self.kind
            text = f"{self.model} was not trained on {bands}: expect few certificates"
            yield Warned("model", text)
        elif self.band and self.band != size:
            yield Warned("band", f"{self.band} differs from the training band {size}")
        if self.delta_rule != "exact":
            text = "paper_reference reproduces published tables; its certificates are not sound"
            yield Warned("delta_rule", text)
        yield from self._stride_warnings(trained.image_size)
        yield from self._early_stop_warnings(trained.known_side)
        yield from PatchSettings.warnings(self, trained)

    def _stride_warnings(self, width: int | None) -> Iterator[Warned]:
        swept = self.sweep is not None and bool(self.sweep.stride)
        for stride in self.strides:
            if width and width % stride:
                text = f"{stride} does not divide {width}: patches at the seam touch one band more"
                yield Warned("sweep.stride" if swept else "stride", text)

    def _early_stop_warnings(self, side: int | None) -> Iterator[Warned]:
        """Votes stop between micro-batches: one that holds all of them saves nothing."""
        if side is None or not self.stop_early:
            return
        from components.data.ablation import Ablations  # here: needs torch

        rows = self.micro_batch
        for stride in self.strides:
            size = (side, side)
            count = len(Ablations(kind=self.kind, image_size=size, band=1, stride=stride))
            if rows != "auto" and rows >= count:
                text = (
                    f"saves nothing: micro_batch {rows} computes all {count} ablations "
                    f"of stride {stride} at once; lower it or leave stop_early out"
                )
                yield Warned("stop_early", text)

    @classmethod
    def keep_valid(cls, values: dict[str, Any]) -> None:
        for axis in (values.get("sweep") or {}).values():
            del axis[MAX_SWEPT:]

    def entries(self, name: str) -> dict[str, CertificateEntry]:
        """Itself, or one entry for each size and stride of its sweep.

        Ablations start at all multiples of the stride, so those of stride s are among those of
        every stride that divides s: the smallest such stride votes, the others use a subset of its
        votes. Votes that stop early are incomplete, so then every entry has its own votes.
        """
        if self.sweep is None:
            return {name: CertificateEntry(self)}
        strides = sorted(self.sweep.stride) or [self.stride]
        bands: list[int | None] = [*sorted(self.sweep.band)] or [self.band]
        entries = {}
        for band in bands:
            names = {stride: self._entry_name(name, band, stride) for stride in strides}
            for stride in strides:
                own = replace(self, band=band, stride=stride, sweep=None)
                finest = next(s for s in strides if stride % s == 0)
                alone = finest == stride or self.stop_early
                entries[names[stride]] = CertificateEntry(own, None if alone else names[finest])
        return entries

    def _entry_name(self, name: str, band: int | None, stride: int) -> str:
        assert self.sweep is not None
        swept = [f"b{band}"] * bool(self.sweep.band) + [f"s{stride}"] * bool(self.sweep.stride)
        return "-".join([name, *swept])


@FAMILIES.register("components.certify.patch.family:DoubleMaskingFamily")
@settings
class DoubleMaskingSettings(PatchSettings):
    """Patch certificates by pairs of masks, for a patch of known size (Xiang et al. 2022)."""

    pixel_fields: ClassVar[tuple[str, ...]] = (*PatchSettings.pixel_fields, "mask_patch")

    kind: Literal["double_masking"] = "double_masking"  # type: ignore[assignment]
    mask_patch: Count
    """The largest patch that the masks hide."""
    num_masks: Annotated[int, Ge(2)] = 6
    """Masks per side."""

    def problems(self) -> Iterator[Problem]:
        yield from PatchSettings.problems(self)
        if max(self.patch_sizes) > self.mask_patch:
            remedy = f"is larger than mask_patch {self.mask_patch}, which the masks hide"
            yield Problem("patch_sizes", max(self.patch_sizes), remedy)

    def lengths(self) -> Iterator[tuple[str, int]]:
        yield from PatchSettings.lengths(self)
        yield "mask_patch", self.mask_patch

    def max_votes(self, *, side: int) -> int:
        return int(self.num_masks**4)

    def warnings(self, trained: TrainedModel) -> Iterator[Warned]:
        if trained.ablation:
            text = f"{self.model} was trained on narrow ablations, but these masks hide little"
            yield Warned("model", text)
        yield from PatchSettings.warnings(self, trained)


SIZES_HELP = "Comma-separated patch sides in pixels."


@settings
class AblationClaimSettings(ClaimSettings):
    """Settings of a claim from votes over ablations."""

    help: ClassVar[dict[str, str]] = {
        "patch_sizes": SIZES_HELP,
        "rule": "strict, count or loc (patches).",
        "delta_rule": "exact, or paper_reference: published tables, not sound (patches).",
        "second_rule": "none, or loc as a second column (patches).",
    }

    patch_sizes: PatchSizes
    rule: Rule
    delta_rule: DeltaRule = default_of(AblationSettings, "delta_rule")
    second_rule: SecondRule = default_of(AblationSettings, "second_rule")


@settings
class DoubleMaskingClaimSettings(ClaimSettings):
    """Settings of a claim from pairs of masks."""

    help: ClassVar[dict[str, str]] = {"patch_sizes": SIZES_HELP}

    patch_sizes: PatchSizes
