"""Gaps between the two largest pre-softmax logits, over samples, heads and queries.

Jain & Dutta, "Towards Understanding and Improving Adversarial Robustness of Vision Transformers",
sec. 3: where the gap is too large for the number format, softmax is flat and gradients vanish.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from components.models.attention.discover import attention_of, check_patchable
from components.models.attention.softmax import SoftmaxTap, tapped


@dataclass(frozen=True, slots=True)
class SoftmaxLimits:
    """Gaps of two logits at which softmax loses information in a number format."""

    cancels: float  # the larger weight rounds to 1: the gradient of the winning logit is 0
    underflows: float  # the smaller weight is 0: so are all gradients


LIMITS: Mapping[torch.dtype, SoftmaxLimits] = {
    torch.float64: SoftmaxLimits(36.75, 745.15),
    torch.float32: SoftmaxLimits(16.65, 104.0),
    torch.bfloat16: SoftmaxLimits(6.25, 92.75),
    torch.float16: SoftmaxLimits(8.35, 17.35),
}

BINS_PER_DECADE = 128  # quantiles are right to 10^(1/256) - 1 = 0.9 %
DECADES = (-4, 4)


# Logarithmic edges of the histogram; plus one bin below the first and one above the last.
EDGES = torch.logspace(
    DECADES[0], DECADES[1], (DECADES[1] - DECADES[0]) * BINS_PER_DECADE + 1, dtype=torch.float64
)
# Down to 1e-12: attention that is scaled by 1e-7 has gaps that small.
WIDE_EDGES = torch.cat(
    [torch.logspace(-12, DECADES[0], 8 * BINS_PER_DECADE + 1, dtype=torch.float64)[:-1], EDGES]
)


@dataclass(slots=True)
class GapHistogram:
    """Histogram of the gaps of one attention module, of any number of batches."""

    limits: SoftmaxLimits
    counts: Tensor = field(default_factory=lambda: torch.zeros(len(EDGES) + 1, dtype=torch.int64))
    largest: float = 0.0
    num_cancelled: int = 0
    num_underflowed: int = 0
    edges: Tensor = field(default_factory=lambda: EDGES)

    @classmethod
    def empty(cls, limits: SoftmaxLimits, edges: Tensor) -> "GapHistogram":
        """A histogram with these edges."""
        return cls(limits, torch.zeros(len(edges) + 1, dtype=torch.int64), edges=edges)

    def add(self, gaps: Tensor) -> None:
        """Count gaps of any shape; where a mask leaves a single key, the gap is infinite."""
        gaps = gaps.flatten().cpu().double()
        self.counts += torch.bincount(
            torch.bucketize(gaps, self.edges, right=True), minlength=len(self.counts)
        )
        self.largest = max(self.largest, float(gaps.max()))
        self.num_cancelled += int((gaps > self.limits.cancels).sum())
        self.num_underflowed += int((gaps > self.limits.underflows).sum())

    def merged(self, other: "GapHistogram") -> "GapHistogram":
        """The histogram of both; counts add up, so the order does not matter."""
        if self.limits != other.limits or len(self.edges) != len(other.edges):
            raise ValueError("histograms of two number formats or ranges cannot be merged")
        return GapHistogram(
            self.limits,
            self.counts + other.counts,
            max(self.largest, other.largest),
            self.num_cancelled + other.num_cancelled,
            self.num_underflowed + other.num_underflowed,
            self.edges,
        )

    @property
    def num_gaps(self) -> int:
        """Number of counted gaps."""
        return int(self.counts.sum())

    def quantile(self, prob: float) -> float:
        """Quantile of the gaps, up to the width of a bin."""
        if not self.num_gaps:
            raise ValueError("no gap was counted; run the network inside the context")
        reached = self.counts.cumsum(0) >= prob * self.num_gaps
        index = int(reached.int().argmax())
        if index == 0:
            return 0.0
        if index == len(self.edges):
            return self.largest
        return min(float((self.edges[index - 1] * self.edges[index]).sqrt()), self.largest)

    def summary(self) -> dict[str, float]:
        """Quantiles, maximum and the shares beyond both limits."""
        return {
            "q50": self.quantile(0.5),
            "q90": self.quantile(0.9),
            "q99": self.quantile(0.99),
            "max": self.largest,
            "cancelled": self.num_cancelled / self.num_gaps,
            "underflowed": self.num_underflowed / self.num_gaps,
        }


def top_gaps(logits: Tensor) -> Tensor:
    """Largest minus second largest entry of the last dimension; infinite for a single key."""
    if logits.shape[-1] < 2:
        return torch.full_like(logits[..., 0], torch.inf)
    top = logits.topk(2, dim=-1).values
    return top[..., 0] - top[..., 1]


class _GapTap(SoftmaxTap):
    def __init__(self, histogram: GapHistogram) -> None:
        super().__init__()
        self.histogram = histogram

    @torch.no_grad()
    def explicit(self, logits: Tensor) -> Tensor:
        self.histogram.add(top_gaps(logits))
        return logits

    @torch.no_grad()
    def fused(self, query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor | None:
        logits = (query * scale) @ key.transpose(-2, -1)
        if mask is not None and mask.dtype == torch.bool:
            logits = logits.masked_fill(~mask, -torch.inf)
        elif mask is not None:
            logits = logits + mask
        self.histogram.add(top_gaps(logits))
        return mask


@contextmanager
def attention_gaps(
    net: nn.Module,
    *,
    dtype: torch.dtype = torch.float32,
    names: Collection[str] | None = None,
    edges: Tensor = EDGES,
) -> Iterator[dict[str, GapHistogram]]:
    """A histogram per attention module (all, or those of `names`) that forward passes fill.

    Outputs do not change. Attention scales are always included, masks if set before. `dtype` picks
    the limits; 16-bit formats have their own.
    """
    sites = attention_of(net, names)
    check_patchable(net)
    histograms = {site.name: GapHistogram.empty(LIMITS[dtype], edges) for site in sites}
    with tapped((site.module, _GapTap(histograms[site.name])) for site in sites):
        yield histograms
