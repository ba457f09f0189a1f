"""Settings of the analyses; defaults follow Bhojanapalli et al. 2021 or the paper that is named."""

from collections.abc import Iterator
from typing import Annotated, Literal

from annotated_types import Ge, MinLen

from components.core.settings import Count, Problem, Settings, settings
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
    distances: tuple[Annotated[int, Ge(0)], ...] | None = None
    """d, in patches along either axis. None: 0 to the side of the grid minus 1."""
    control: bool = True
    """Also a random mask for each distance, equally dense; masks of larger distances contain it."""
    keep_self: bool = True
    """Whether a patch sees itself in `cls_only`."""
    depths: tuple[Annotated[int, Ge(0)], ...] | None = None
    """k. None: 0 to the number of blocks."""
    subset: SubsetSettings = SubsetSettings(num_items=1000)

    def problems(self) -> Iterator[Problem]:
        for field in ("what", "distances", "depths"):
            values = getattr(self, field) or ()
            if len(set(values)) < len(values):
                yield Problem(field, ", ".join(map(str, values)), "names one twice")
        if self.what is not None and "distance" not in self.what and self.distances is not None:
            remedy = "would be ignored: what does not name distance; remove it"
            yield Problem("distances", self.distances, remedy)
