"""Lesion study: accuracy after parts of a trained network are removed, at inference only.

Bhojanapalli et al. 2021, sec. 4 and appendix G: each block, attention or MLP alone; then n of
them at once, 25 random sets for each n, the first block always kept. The residual stream passes a
removed part unchanged (`models/attention/lesions.py`).
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from components.analyze.blocks import Blocks
from components.analyze.prefixes import Variant, variant_predictions, verdicts_of
from components.analyze.settings import LesionSettings, Part
from components.core.errors import CasemateError
from components.core.seeding import generator_for
from components.core.types import Images, IntArray, LogitsFn
from components.evaluate.metrics import Measurement, share
from components.models.attention.discover import BlockSite
from components.models.attention.lesions import removable_parts, without

PARTS: tuple[Part, ...] = ("block", "attn", "mlp", "local")


@dataclass(frozen=True, slots=True)
class Removal:
    """The removal of one part of a block."""

    part: str

    @property
    def key(self) -> str:
        """Orders variants."""
        return self.part

    def on(self, blocks: Blocks, site: BlockSite) -> AbstractContextManager[Any]:
        """The part is missing inside the context."""
        return without(site, self.part)


@dataclass(frozen=True, slots=True)
class Lesion:
    """The same part of some blocks is removed; no blocks: the whole network."""

    part: Part
    places: tuple[int, ...]  # in `Blocks.sites`

    @property
    def name(self) -> str:
        """As in `mlp-2-5`; `none` is the whole network."""
        return "-".join([self.part, *map(str, self.places)]) if self.places else "none"

    def variant(self, depth: int) -> Variant:
        """What it does to each of `depth` blocks."""
        change = Removal(self.part)
        return tuple(change if place in self.places else None for place in range(depth))


def sampled_sets(depth: int, count: int, *, num_samples: int, seed: int) -> list[tuple[int, ...]]:
    """`num_samples` different sets of `count` of the places 1 to depth - 1; all, if fewer exist.

    They depend on (seed, depth, count) only: parts and models of equal depth share them.
    """
    if not 1 <= count < depth:
        raise ValueError(f"cannot remove {count} of {depth} blocks and keep the first")
    if math.comb(depth - 1, count) <= num_samples:
        return list(combinations(range(1, depth), count))
    generator = generator_for(seed, "lesions", depth, count)
    found: dict[tuple[int, ...], None] = {}  # in the order of the draws
    while len(found) < num_samples:
        drawn = torch.randperm(depth - 1, generator=generator)[:count] + 1
        found.setdefault(tuple(sorted(drawn.tolist())))
    return list(found)


def lesions_of(blocks: Blocks, how: LesionSettings, *, seed: int) -> list[Lesion]:
    """The whole network, every single part, then the sampled sets; 673 for 12 blocks.

    Where some blocks lack a part, as the class blocks of XCiT lack all but `block`, its sets are
    drawn from the blocks that have it.
    """
    found = [Lesion("block", ())]
    for part in how.parts or _parts(blocks):
        places = removable_places(blocks, part)
        depth = len(places)
        found += [Lesion(part, (place,)) for place in places]
        for count in range(2, depth) if how.counts is None else how.counts:
            _check_count(count, part, depth)
            chosen = sampled_sets(depth, count, num_samples=how.num_samples, seed=seed)
            found += [Lesion(part, tuple(places[i] for i in one)) for one in chosen]
    return found


def _parts(blocks: Blocks) -> list[Part]:
    known = {part for site in blocks.sites for part in removable_parts(site)}
    return [part for part in PARTS if part in known]


def removable_places(blocks: Blocks, part: Part) -> list[int]:
    """The blocks that have this part."""
    places = [place for place, site in enumerate(blocks.sites) if part in removable_parts(site)]
    if not places:
        known = ", ".join(_parts(blocks)) or "nothing"
        name = type(blocks.net).__name__
        raise CasemateError("parts", part, f"cannot be removed from {name}; it has {known}")
    return places


def _check_count(count: int, part: str, depth: int) -> None:
    if count >= depth:
        remedy = f"is too many: {depth} blocks have {part} and the first is kept; at most"
        raise CasemateError("counts", count, f"{remedy} {depth - 1}")


def lesion_predictions(
    logits_of: LogitsFn, blocks: Blocks, x: Images, lesions: Sequence[Lesion]
) -> IntArray:
    """(S, B) predictions after each lesion; passes share the blocks before their first difference.

    Hold `attack_mode(model)` around the call.
    """
    blocks.check_named(logits_of, x)
    if blocks.named:
        _check_shapes(
            logits_of, [site for site in blocks.sites if site.layout.stream is not None], x
        )
    depth = len(blocks.sites)
    return variant_predictions(logits_of, blocks, x, [one.variant(depth) for one in lesions])


def measurements(results: pa.Table, lesions: Sequence[Lesion]) -> list[Measurement]:
    """Clean accuracy; per part and block the accuracy without it (`single_accuracy`, level: block);
    per part and count n (level) the mean over sets, its standard error, lowest and highest.
    """
    correct = verdicts_of(results)
    if correct.shape[1] != len(lesions):
        raise ValueError(f"{correct.shape[1]} predictions per item, {len(lesions)} lesions")
    groups: dict[tuple[str, int], list[int]] = {}
    found = []
    for place, lesion in enumerate(lesions):
        if not lesion.places:
            found.append(share(correct[:, place], item="none", metric="accuracy"))
        elif len(lesion.places) == 1:
            level = lesion.places[0]
            rows = correct[:, place]
            found.append(share(rows, item=lesion.part, level=level, metric="single_accuracy"))
        else:
            groups.setdefault((lesion.part, len(lesion.places)), []).append(place)
    for (part, count), places in groups.items():
        found += _summary(correct[:, places].mean(axis=0), part, count, num_items=len(correct))
    return found


def _summary(
    accuracies: NDArray[np.float64], part: str, count: int, *, num_items: int
) -> list[Measurement]:
    """Mean, sd / sqrt(m), minimum and maximum over the m sets of one size; one set has no error."""
    m = len(accuracies)
    values = {
        "mean_accuracy": accuracies.mean(),
        "min_accuracy": accuracies.min(),
        "max_accuracy": accuracies.max(),
        "num_sets": m,
    }
    if m > 1:
        values["standard_error"] = accuracies.std(ddof=1) / math.sqrt(m)
    return [
        Measurement(item=part, level=count, metric=name, value=float(value), n=num_items)
        for name, value in values.items()
    ]


@torch.no_grad()
def _check_shapes(logits_of: LogitsFn, sites: Sequence[BlockSite], x: Images) -> None:
    """Reject blocks of a user that cannot be left out: output and first argument must agree."""
    handles = []
    for site in sites:

        def compare(module: nn.Module, args: Any, output: Any, site: BlockSite = site) -> None:
            stream = site.layout.stream or 0
            given = args[stream] if len(args) > stream else None
            if not isinstance(given, Tensor) or given.shape != getattr(output, "shape", None):
                remedy = "cannot be removed: its output does not have the shape of its input"
                raise CasemateError("blocks.names", site.name, remedy)

        handles.append(site.module.register_forward_hook(compare))
    try:
        logits_of(x[:1])
    finally:
        for handle in handles:
            handle.remove()
