"""Histograms of pre-softmax gaps for figures: clean and attacked, before and after AAS.

Jain & Dutta, "Towards Understanding and Improving Adversarial Robustness of Vision Transformers",
sec. 3 and Fig. 2. Histograms are those of `models/attention/gaps.py`; here they become states that
units of items add up.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from components.analyze.settings import GapSettings
from components.attacks.gradient import sign_ascent
from components.attacks.interface import Items
from components.attacks.scales import Scales, ScaleSearch
from components.attacks.settings import PgdSettings
from components.attacks.starts import random_point
from components.core.errors import CasemateError
from components.core.settings import values_of
from components.core.types import Array, Images, LogitsFn
from components.evaluate.metrics import Measurement, null
from components.models.attention.discover import attention_of
from components.models.attention.gaps import (
    BINS_PER_DECADE,
    LIMITS,
    WIDE_EDGES,
    GapHistogram,
    attention_gaps,
)
from components.models.attention.scaling import scaled_attention

CLEAN, ATTACKED = "clean", "attacked"
BEFORE, AFTER = "before", "after"  # scaling


@dataclass(frozen=True, slots=True, eq=False)
class GapState:
    """A histogram as a mergeable state."""

    histogram: GapHistogram

    def merged(self, other: "GapState") -> "GapState":
        """The state of both."""
        return GapState(self.histogram.merged(other.histogram))

    def arrays(self) -> dict[str, Array]:
        """The content of the state."""
        own = self.histogram
        return {
            "counts": own.counts.numpy(),
            "beyond": np.array([own.num_cancelled, own.num_underflowed]),
            "largest": np.array(own.largest),
        }

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, Array], how: GapSettings) -> "GapState":
        """The state that `arrays` describes."""
        counts = torch.from_numpy(arrays["counts"].astype(np.int64))
        cancelled, underflowed = (int(value) for value in arrays["beyond"])
        limits = LIMITS[_dtype(how)]
        largest = float(arrays["largest"])
        return cls(GapHistogram(limits, counts, largest, cancelled, underflowed, WIDE_EDGES))


def module_names(net: nn.Module, how: GapSettings) -> list[str]:
    """The attention modules of a study: those of `positions`, or first, middle and last."""
    names = [site.name for site in attention_of(net)]
    if how.positions is None:
        last = len(names) - 1
        return [names[place] for place in sorted({0, last // 2, last})]
    if beyond := [place for place in how.positions if place >= len(names)]:
        remedy = f"is not an attention module of {type(net).__name__}, which has {len(names)}"
        raise CasemateError("positions", beyond[0], remedy)
    return [names[place] for place in sorted(set(how.positions))]


def attacked_images(logits_of: LogitsFn, items: Items, how: GapSettings) -> Images:
    """The last iterate of PGD in l-inf with its usual step size, for every item."""
    start = random_point(items, norm="linf", eps=how.eps, stream="gaps")
    step_size = PgdSettings(num_steps=how.num_steps).step_size_at(how.eps)
    return sign_ascent(
        logits_of, items.x, items.y, start=start, eps=how.eps, step_size=step_size,
        num_steps=how.num_steps,
    )  # fmt: skip


def searched_scales(
    logits_of: LogitsFn, net: nn.Module, reference: Items, how: GapSettings
) -> Scales | None:
    """Factors of the scaled network, from reference items that are fixed for the whole run."""
    if how.search is None:
        return None
    search = ScaleSearch(**values_of(how.search))
    rows = torch.arange(min(len(reference), search.num_items), device=reference.x.device)
    return search(logits_of, net, reference.take(rows))[0]


@torch.no_grad()
def gap_states(
    logits_of: LogitsFn,
    net: nn.Module,
    images: Mapping[str, Images],
    how: GapSettings,
    *,
    scales: Scales | None,
) -> dict[str, GapState]:
    """States of one batch, named `clean/before/blocks.0.attn`; `after` only with scales.

    `images` are those of `clean` and `attacked`. Hold `attack_mode(model)` around the call.
    """
    names, found = module_names(net, how), {}
    for scaling in (BEFORE,) if scales is None else (BEFORE, AFTER):
        for kind, x in images.items():
            with ExitStack() as stack:
                if scaling == AFTER:
                    factors = torch.tensor(scales, device=x.device)
                    stack.enter_context(scaled_attention(net, factors))
                kept = attention_gaps(net, dtype=_dtype(how), names=names, edges=WIDE_EDGES)
                histograms = stack.enter_context(kept)
                logits_of(x)
            for name, histogram in histograms.items():
                found[f"{kind}/{scaling}/{name}"] = GapState(histogram)
    return found


def densities(histogram: GapHistogram, *, bins_per_decade: int) -> tuple[Tensor, Tensor]:
    """(edges, share of rows per bin) on fewer bins; the outer two bins, without an edge, are left
    out, so shares add up to less than 1 where gaps are below 1e-12 or above 1e4.
    """
    width = BINS_PER_DECADE // bins_per_decade
    if width * bins_per_decade != BINS_PER_DECADE:
        raise ValueError(f"bins_per_decade must divide {BINS_PER_DECADE}, got {bins_per_decade}")
    inner = histogram.counts[1:-1].view(-1, width).sum(dim=1)
    return histogram.edges[::width], inner.double() / max(histogram.num_gaps, 1)


def measurements(states: Mapping[str, GapState]) -> list[Measurement]:
    """Quantiles, maximum and shares beyond the limits of every state."""
    found = []
    for name, state in states.items():
        n = state.histogram.num_gaps
        for metric, value in state.histogram.summary().items():
            if np.isfinite(value):
                found.append(Measurement(item=name, metric=metric, value=value, n=n))
            else:
                found.append(null(item=name, metric=metric, why="a query has a single key"))
    return found


def _dtype(how: GapSettings) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, how.number_format)
    return dtype
