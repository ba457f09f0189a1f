"""Grouping of ablations into batches, and the parts whose sums are their tokens.

A plan depends only on the shape of the model and the ablations, not on images or workers.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from components.data.ablation import Ablations
from components.models.masked_votes import MASKS_AT_ONCE, group_by_tokens
from components.models.partial_tokens import ALONE, CutCells, can_embed_cuts, cut_cells
from components.models.pixels import PixelModel
from components.models.tokens import patch_size_of


@dataclass(frozen=True, slots=True)
class Group:
    """Ablations that keep equally many tokens."""

    numbers: Tensor  # (G,) which ablations
    cells: CutCells | None  # their tokens; None: ablated images go through the whole model
    any_alone: bool = False  # the visible part of some cell is in no table


@dataclass(frozen=True, slots=True)
class AblationPlan:
    """Groups and patterns of all ablations of an image."""

    ablations: Ablations
    groups: tuple[Group, ...]
    patterns: tuple[int, ...]  # in the tables of partial tokens; empty without cells


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
) -> AblationPlan:
    """The plan of all ablations; `in_cells` if `embeds_cuts`."""
    return _plan(model, ablations, model.spec.token_policy, in_cells, device)


@lru_cache(maxsize=4)  # keeps its models alive: only as many as a worker uses
def _plan(
    model: PixelModel, ablations: Ablations, policy: str, in_cells: bool, device: torch.device
) -> AblationPlan:
    if policy == "mask":
        return AblationPlan(
            ablations, (Group(torch.arange(len(ablations), device=device), None),), ()
        )
    members = group_by_tokens(model, ablations, device=device)
    if not in_cells:
        return AblationPlan(ablations, tuple(Group(group, None) for group in members), ())
    groups = [_group(model, ablations, group) for group in members]
    shown = {n for g in groups if g.cells for n in g.cells.pattern.flatten().tolist()}
    return AblationPlan(ablations, tuple(groups), tuple(sorted(shown - {ALONE} | {0})))


def _group(model: PixelModel, ablations: Ablations, numbers: Tensor) -> Group:
    size, num_kept = patch_size_of(model.net), int(model.num_kept(ablations[numbers[:1]]))
    kept = numbers.new_empty(len(numbers), num_kept)  # filled span by span, see `spans`
    pattern = torch.empty_like(kept)
    for rows in torch.split(torch.arange(len(numbers), device=numbers.device), MASKS_AT_ONCE):
        masks = ablations[numbers[rows]]
        cells = cut_cells(model.resized_mask(masks), model.kept_tokens(masks), size)
        kept[rows], pattern[rows] = cells.kept, cells.pattern
    return Group(numbers, CutCells(kept, pattern), bool((pattern == ALONE).any()))
