"""Restricted attention: which patches may attend to which, at inference only.

Bhojanapalli et al. 2021, sec. 4 and appendix A: pairs of patches more than d apart on either axis
of the grid are masked; the control masks equally many pairs, chosen by one random permutation that
is the same for all d, so its masks are nested. Prefix tokens (class, distillation, registers) see
all tokens and are seen by all. In the extreme case no patch sees another one, in the first or last
k blocks.

Symbols: P = prefix tokens, N = patches of a grid (rows, columns); masks are (P + N, P + N) bool,
true where query i may attend to key j.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import torch
from timm.models.xcit import Xcit
from torch import Tensor

from components.analyze.blocks import Blocks
from components.analyze.lesions import Removal, removable_places
from components.analyze.prefixes import Change, Variant, variant_predictions, verdicts_of
from components.analyze.settings import RestrictedAttentionSettings
from components.core.errors import CasemateError
from components.core.seeding import generator_for
from components.core.types import Images, IntArray, LogitsFn
from components.evaluate.metrics import Measurement, share
from components.models.attention.discover import FAMILIES, KINDS, BlockSite, attention_of
from components.models.attention.masks import REASONS, masked_pairs

Grid = tuple[int, int]
PAIRED = ("tokens", "talking_heads")  # kinds of attention between the tokens of one sequence
MASKABLE = "ViT, DeiT, CaiT, BEiT, Eva"
NO_PREFIX = "no_prefix_token"  # flag: patches also see themselves in the control


@dataclass(frozen=True, slots=True)
class Masked:
    """The attention of a block, restricted to the pairs of a mask."""

    key: str
    allowed: Tensor = field(compare=False)

    def on(self, blocks: Blocks, site: BlockSite) -> AbstractContextManager[Any]:
        """Other pairs are masked inside the context."""
        names = [f"{site.name}.{path}" for path, _ in site.parts(site.layout.attention)]
        return masked_pairs(blocks.net, self.allowed, names=names)


@dataclass(frozen=True, slots=True)
class Restriction:
    """A restricted network: `item` and `level` name it in results."""

    item: str  # `spatial`, `random`, `cls_first`, `cls_last`, `local_first`, `local_last`
    level: int  # d or k
    variant: Variant
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As in `spatial-2`."""
        return f"{self.item}-{self.level}"


def distance_mask(grid: Grid, distance: int, *, num_prefix: int) -> Tensor:
    """Patches at most `distance` apart along both axes."""
    rows, columns = grid
    near = [
        (places[:, None] - places[None]).abs() <= distance
        for places in (torch.arange(rows), torch.arange(columns))
    ]
    pairs = near[0][:, None, :, None] & near[1][None, :, None, :]  # (r, c, r', c')
    return with_prefix(pairs.reshape(rows * columns, -1), num_prefix=num_prefix)


def random_mask(mask: Tensor, *, num_prefix: int, seed: int) -> Tensor:
    """As many pairs of patches as `mask` allows, the first of a random order of all pairs.

    Without a prefix token a patch keeps itself, so that every query has a key, and the others are
    chosen at random.
    """
    pairs = mask[num_prefix:, num_prefix:]
    num_patches = len(pairs)
    order = torch.randperm(num_patches**2, generator=generator_for(seed, "attention", num_patches))
    kept = torch.zeros(num_patches**2, dtype=torch.bool)
    if not num_prefix:
        own = torch.arange(num_patches) * (num_patches + 1)
        kept[own] = True
        order = order[~kept[order]]
    kept[order[: int(pairs.sum()) - int(kept.sum())]] = True
    return with_prefix(kept.view(num_patches, num_patches), num_prefix=num_prefix)


def cls_only_mask(grid: Grid, *, num_prefix: int, keep_self: bool) -> Tensor:
    """Patches see prefix tokens and, if `keep_self`, themselves."""
    own = torch.eye(grid[0] * grid[1], dtype=torch.bool)
    return with_prefix(own if keep_self else torch.zeros_like(own), num_prefix=num_prefix)


def with_prefix(pairs: Tensor, *, num_prefix: int) -> Tensor:
    """The mask of all tokens from that of the patches."""
    whole = torch.ones([num_prefix + len(pairs)] * 2, dtype=torch.bool)
    whole[num_prefix:, num_prefix:] = pairs
    return whole


def restrictions_of(
    blocks: Blocks, how: RestrictedAttentionSettings, *, seed: int
) -> list[Restriction]:
    """All restrictions of a study; networks without such attention are rejected by name."""
    what = how.what or (("distance", "cls_only") if blocks.has_class_token else ("distance",))
    found: list[Restriction] = []
    for one in what:
        if one == "local":
            places = removable_places(blocks, "local")
            found += _by_depth("local", places, Removal("local"), blocks, how)
            continue
        places = _paired_places(blocks)
        grid = _grid(blocks)
        if one == "distance":
            found += _by_distance(places, grid, blocks, how, seed=seed)
        else:
            found += _cls_only(places, grid, blocks, how)
    return found


def _by_distance(
    places: Sequence[int],
    grid: Grid,
    blocks: Blocks,
    how: RestrictedAttentionSettings,
    *,
    seed: int,
) -> list[Restriction]:
    prefix = blocks.num_prefix_tokens
    found = []
    for distance in range(max(grid)) if how.distances is None else how.distances:
        mask = distance_mask(grid, distance, num_prefix=prefix)
        spatial = _variant(blocks, places, Masked(f"spatial-{distance:04d}", mask))
        found.append(Restriction("spatial", distance, spatial))
        if how.control:
            shuffled = random_mask(mask, num_prefix=prefix, seed=seed)
            control = _variant(blocks, places, Masked(f"random-{distance:04d}", shuffled))
            flags = () if prefix else (NO_PREFIX,)
            found.append(Restriction("random", distance, control, flags))
    return found


def _cls_only(
    places: Sequence[int], grid: Grid, blocks: Blocks, how: RestrictedAttentionSettings
) -> list[Restriction]:
    if not blocks.has_class_token:
        name = type(blocks.net).__name__
        remedy = f"needs a class token beside the patches, which {name} does not have; remove it"
        raise CasemateError("what", "cls_only", remedy)
    prefix = blocks.num_prefix_tokens
    mask = cls_only_mask(grid, num_prefix=prefix, keep_self=how.keep_self)
    return _by_depth("cls", places, Masked("cls", mask), blocks, how)


def _by_depth(
    item: str,
    places: Sequence[int],
    change: Change,
    blocks: Blocks,
    how: RestrictedAttentionSettings,
) -> list[Restriction]:
    """The change in the first k and in the last k of these blocks."""
    depth = len(places)
    found = []
    for k in range(depth + 1) if how.depths is None else how.depths:
        if k > depth:
            raise CasemateError("depths", k, f"is more than the {depth} blocks of the network")
        first = _variant(blocks, places[:k], change)
        last = _variant(blocks, places[depth - k :], change)
        found += [Restriction(f"{item}_first", k, first), Restriction(f"{item}_last", k, last)]
    return found


def _variant(blocks: Blocks, places: Sequence[int], change: Change) -> Variant:
    return tuple(change if i in places else None for i in range(len(blocks.sites)))


def _paired_places(blocks: Blocks) -> list[int]:
    """Blocks with attention between patches; an error names networks that have none."""
    name = type(blocks.net).__name__
    if isinstance(blocks.net, Xcit):
        remedy = f"has attention over channels, not tokens; write what: [local], or use {MASKABLE}"
        raise CasemateError("model.architecture", name, remedy)
    if not isinstance(blocks.net, tuple(FAMILIES)):
        remedy = f"has no attention that can be restricted; networks that do: {MASKABLE}"
        raise CasemateError("model.architecture", name, remedy)
    attention_of(blocks.net)  # rejects modules without access
    places = []
    for place, site in enumerate(blocks.sites):
        kinds = [KINDS.get(type(part)) for _, part in site.parts(site.layout.attention)]
        if reason := next((REASONS[kind] for kind in kinds if kind in REASONS), None):
            remedy = f"takes no mask: {reason}; networks that do: {MASKABLE}"
            raise CasemateError("model.architecture", name, remedy)
        if any(kind in PAIRED for kind in kinds):
            places.append(place)
    return places


def _grid(blocks: Blocks) -> Grid:
    net: Any = blocks.net
    rows, columns = net.patch_embed.grid_size
    return int(rows), int(columns)


def restricted_predictions(
    logits_of: LogitsFn, blocks: Blocks, x: Images, restrictions: Sequence[Restriction]
) -> IntArray:
    """(R, B) predictions under each restriction; hold `attack_mode(model)` around the call."""
    return variant_predictions(logits_of, blocks, x, [one.variant for one in restrictions])


def measurements(results: pa.Table, restrictions: Sequence[Restriction]) -> list[Measurement]:
    """The accuracy under each restriction."""
    correct = verdicts_of(results)
    if correct.shape[1] != len(restrictions):
        raise ValueError(f"{correct.shape[1]} predictions, {len(restrictions)} restrictions")
    return [
        share(correct[:, place], item=one.item, level=one.level, flags=one.flags)
        for place, one in enumerate(restrictions)
    ]
