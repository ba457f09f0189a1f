"""Which ablations of an image may share a batch, and what their tokens are made of.

A plan follows from the shape of the model and the ablations alone, never from images or workers.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from components.data.ablation import Ablations
from components.models.partial_tokens import ALONE, CutCells, can_embed_cuts, cut_cells
from components.models.pixels import PixelModel
from components.models.tokens import patch_size_of

MASKS_AT_ONCE = 256  # while planning: the masks of all squares together would fill the memory


@dataclass(frozen=True, slots=True)
class Group:
    """Ablations that keep equally many tokens."""

    numbers: Tensor  # (G,) which ablations
    cells: CutCells | None  # their tokens; None: ablated images go through the whole model
    any_alone: bool = False  # some cell shows what no table holds


@dataclass(frozen=True, slots=True)
class Plan:
    """What can be asked of every image."""

    ablations: Ablations
    groups: tuple[Group, ...]
    patterns: tuple[int, ...]  # that tables of partial tokens must hold; none without cells


def embeds_cuts(model: PixelModel) -> bool:
    """Whether tokens may come from sums: resizing must commute with hiding pixels."""
    spec = model.spec
    return (
        spec.token_policy == "drop"
        and (spec.upsample is None or spec.upsample_mode == "nearest")
        and can_embed_cuts(model.net)
    )


def plan_for(
    model: PixelModel, ablations: Ablations, *, in_cells: bool, device: torch.device
) -> Plan:
    """The plan of all ablations; `in_cells` where `embeds_cuts`."""
    return _plan(model, ablations, model.spec.token_policy, in_cells, device)


@lru_cache(maxsize=4)  # holds its models: no more than a worker uses in turn
def _plan(
    model: PixelModel, ablations: Ablations, policy: str, in_cells: bool, device: torch.device
) -> Plan:
    numbers = torch.arange(len(ablations), device=device)
    if policy == "mask":
        return Plan(ablations, (Group(numbers, None),), ())
    spans = torch.split(numbers, MASKS_AT_ONCE)
    counts = torch.cat([model.kept_tokens(ablations.masks(span)).sum(dim=1) for span in spans])
    members = [numbers[counts == count] for count in sorted(set(counts.tolist()))]
    if not in_cells:
        return Plan(ablations, tuple(Group(group, None) for group in members), ())
    groups = [_group(model, ablations, group) for group in members]
    shown = {n for g in groups if g.cells for n in g.cells.pattern.flatten().tolist()}
    return Plan(ablations, tuple(groups), tuple(sorted(shown - {ALONE} | {0})))


def _group(model: PixelModel, ablations: Ablations, numbers: Tensor) -> Group:
    size = patch_size_of(model.net)
    parts = []
    for span in torch.split(numbers, MASKS_AT_ONCE):
        masks = ablations.masks(span)
        parts.append(cut_cells(model.resized_mask(masks), model.kept_tokens(masks), size))
    kept, pattern = torch.cat([p.kept for p in parts]), torch.cat([p.pattern for p in parts])
    return Group(numbers, CutCells(kept, pattern), bool((pattern == ALONE).any()))
