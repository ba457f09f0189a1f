"""Settings of the analyses; defaults follow Bhojanapalli et al. 2021 or the paper that is named."""

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Literal

from annotated_types import Ge, MinLen

from components.attacks.settings import ScaleAscentSettings
from components.core.settings import (
    Budget,
    Count,
    Name,
    PositivePixels,
    Problem,
    Settings,
    settings,
)
from components.evaluate.settings import SubsetSettings

Tokens = Literal["all", "cls"]
Measure = Literal["pearson", "cka"]
Part = Literal["block", "attn", "mlp", "local"]
Restricted = Literal["distance", "cls_only", "local"]


@settings
class BlockSettings(Settings):
    """The blocks of a network; needed for user modules only."""

    names: Annotated[tuple[str, ...], MinLen(1)] | None = None
    """Module paths in the order of execution, `*` for one part: `encoder.layers.*`. None: those of
    a known family."""
    num_prefix_tokens: Annotated[int, Ge(0)] | None = None
    """Tokens before the patches, the class token first. None: those of a known family, else 0."""

    def problems(self) -> Iterator[Problem]:
        if len(set(self.names or ())) < len(self.names or ()):
            yield Problem("names", ", ".join(self.names or ()), "names a block twice")
        if self.num_prefix_tokens is not None and self.names is None:
            remedy = "would be ignored: the family of the network determines it; remove it"
            yield Problem("num_prefix_tokens", self.num_prefix_tokens, remedy)


@settings
class CorrelationSettings(Settings):
    """Similarity of the outputs of all pairs of blocks."""

    kind: Literal["correlation"] = "correlation"
    measure: Measure | None = None
    """Absolute Pearson correlation or linear CKA. None: CKA where outputs of blocks differ in
    shape (ResNet, Swin, LeViT), else Pearson."""
    mode: Literal["flat", "per_sample", "per_feature"] = "flat"
    """Of Pearson. `flat`: all entries of all images are one sample; `per_sample`: mean over images;
    `per_feature`: mean over channels."""
    tokens: Annotated[tuple[Tokens, ...], MinLen(1)] = ("all", "cls")
    """`cls` is left out for networks without a class token."""
    estimator: Literal["exact", "minibatch"] | None = None
    """Of CKA. None: exact for at most `cka_batch` images, else minibatches."""
    cka_batch: Annotated[int, Ge(4)] = 256
    """Images whose similarities are computed at once: one forward pass."""
    subset: SubsetSettings = SubsetSettings(num_items=4096)
    """Items whose features are correlated."""

    def problems(self) -> Iterator[Problem]:
        if len(set(self.tokens)) < len(self.tokens):
            yield Problem("tokens", ", ".join(self.tokens), "names one kind twice")
        if self.measure == "cka" and self.mode != "flat":
            yield Problem("mode", self.mode, "would be ignored: measure is cka; remove it")
        if self.measure == "pearson" and self.estimator is not None:
            remedy = "would be ignored: measure is pearson; remove it"
            yield Problem("estimator", self.estimator, remedy)


@settings
class LesionSettings(Settings):
    """Accuracy after the removal of single parts, and of several at once; inference only."""

    kind: Literal["lesions"] = "lesions"
    parts: Annotated[tuple[Part, ...], MinLen(1)] | None = None
    """`local` is XCiT's patch interaction. None: all that the network has."""
    counts: tuple[Annotated[int, Ge(2)], ...] | None = None
    """How many blocks are affected at once. None: 2 to all but the first; an empty list: none."""
    num_samples: Count = 25
    """Different sets per count, fewer where there are not so many; the first block is kept."""
    subset: SubsetSettings = SubsetSettings(num_items=1000)
    """Items that every lesion is measured on."""

    def problems(self) -> Iterator[Problem]:
        for field in ("parts", "counts"):
            values = getattr(self, field) or ()
            if len(set(values)) < len(values):
                yield Problem(field, ", ".join(map(str, values)), "names one twice")


@settings
class RestrictedAttentionSettings(Settings):
    """Accuracy with attention only between some tokens; inference only."""

    kind: Literal["restricted_attention"] = "restricted_attention"
    what: Annotated[tuple[Restricted, ...], MinLen(1)] | None = None
    """`distance`: patches at most d apart; `cls_only`: no patch sees another, in the first or last
    k blocks; `local`: XCiT without its patch interaction there. None: the first two, `cls_only`
    where the blocks have a class token."""
    distances: Annotated[tuple[Annotated[int, Ge(0)], ...], MinLen(1)] | None = None
    """d, in patches along either axis. None: 0 to the side of the grid minus 1."""
    control: bool = True
    """Also a random mask for each distance, equally dense; masks of larger distances contain it."""
    keep_self: bool = True
    """Whether a patch sees itself in `cls_only`."""
    depths: tuple[Annotated[int, Ge(0)], ...] | None = None
    """k. None: 0 to the number of blocks."""
    subset: SubsetSettings = SubsetSettings(num_items=1000)
    """Items that every restriction is measured on."""

    def problems(self) -> Iterator[Problem]:
        for field in ("what", "distances", "depths"):
            values = getattr(self, field) or ()
            if len(set(values)) < len(values):
                yield Problem(field, ", ".join(map(str, values)), "names one twice")
        if self.what is not None and "distance" not in self.what and self.distances is not None:
            remedy = "would be ignored: what does not name distance; remove it"
            yield Problem("distances", self.distances, remedy)


@settings
class GapSettings(Settings):
    """Gaps between the two largest pre-softmax logits, clean and attacked, before and after
    adaptive attention scaling (Jain & Dutta, sec. 3 and Fig. 2).
    """

    kind: Literal["gaps"] = "gaps"
    positions: Annotated[tuple[Annotated[int, Ge(0)], ...], MinLen(1)] | None = None
    """Attention modules in the order of execution. None: first, middle and last."""
    number_format: Literal["float32", "bfloat16", "float16"] = "float32"
    """Whose limits of softmax are counted."""
    eps: PositivePixels = 8 / 255
    """Budget in l-inf of the attack."""
    num_steps: Count = 20
    """Steps of the PGD attack."""
    search: ScaleAscentSettings | None = ScaleAscentSettings(num_draws=1)
    """Factors of the scaled network. None: only the network itself."""
    subset: SubsetSettings = SubsetSettings(num_items=256)
    """Items that are measured, clean and attacked."""

    def problems(self) -> Iterator[Problem]:
        if self.search is not None and self.search.num_draws != 1:
            remedy = "candidates: the figure shows one scaled network; set 1"
            yield Problem("search.num_draws", self.search.num_draws, remedy)


@settings
class PerturbationSettings(Settings):
    """Pictures of perturbations: their patch alignment, and what judges see in them (the thesis
    "Adversarially Robust Vision Transformers", sec. 4.3.1).
    """

    kind: Literal["perturbations"] = "perturbations"
    eps: PositivePixels = 4 / 255
    """Budget in l-inf."""
    num_steps: Count = 100
    """Steps of the attack that makes the perturbations."""
    step_size: Budget | None = None
    """None: 1.5 eps / num_steps."""
    patch_size: Annotated[int, Ge(2)] | None = None
    """Pixels of the grid whose alignment is measured. None: the patch of the model."""
    top_k: Count = 5
    """A judge is right if the true class is among its k highest."""
    num_pictures: Count = 8
    """Items that are shown."""
    judges: dict[Name, str] = dataclasses.field(default_factory=dict)
    """Folders of models that classify the pictures, by their names in results."""
    judge_models: tuple[Name, ...] = ()
    """Models of the recipe that classify the pictures."""
    subset: SubsetSettings = SubsetSettings(num_items=5000)
    """Items that are perturbed."""

    def problems(self) -> Iterator[Problem]:
        if len(set(self.judge_models)) < len(self.judge_models):
            yield Problem("judge_models", ", ".join(self.judge_models), "names a model twice")
        if both := sorted(set(self.judge_models) & set(self.judges)):
            yield Problem("judges", both[0], "is also in judge_models; choose another name")

    def step_size_at(self) -> float:
        """The step size of the attack."""
        return 1.5 * self.eps / self.num_steps if self.step_size is None else self.step_size


@settings
class AccumulationSettings(Settings):
    """Images of a class, grown from noise along the gradient (the same thesis, sec. 4.3.2)."""

    kind: Literal["accumulation"] = "accumulation"
    preset: Literal["thesis", "l2"] = "thesis"
    """`thesis`: l-inf of 15 times the pixel range, in which only the range [0, 1] binds, from a
    start that is almost all black or white; `l2`: an l2 ball of 15 pixels around the noise."""
    num_steps: Count = 100
    """Steps from noise to an image."""
    num_images: Count = 8
    """Images that are grown, each with a random target."""
