"""Base classifiers that vote: one prediction for every ablation of an image.

A vote is the argmax, ties to the lowest class, of the float32 logits that `forward_ablated` gives
one ablated image by itself: that is what certificates are about. Everything else here is a faster
way to the same votes. Ablations that keep equally many tokens share a batch, also across images;
partly visible tokens come from sums (`partial_tokens`); the last block computes what the head reads
(`fast`); compilation and reduced precision are options. All of these move logits by rounding only,
and where a row's two best logits are closer than rounding could explain, its vote is taken again
one by one. So votes depend neither on the other images of a batch nor on its size: any number of
workers gives the same bytes.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from components.core.errors import CasemateError
from components.core.types import Images, Logits
from components.data.ablation import Ablations
from components.models.attention.shadow import shadowed
from components.models.fast import lean
from components.models.partial_tokens import (
    ALONE,
    CutCells,
    PartialTokens,
    can_embed_cuts,
    cut_cells,
)
from components.models.pixels import PixelModel
from components.models.tokens import patch_size_of

# Two best logits closer than this share of the largest one are taken again. In float32, other batch
# shapes and the sums move logits by some 1e-6 of it; numbers of 16 bits carry 8 (bfloat16) or 11
# bits, and a dozen layers lose a few units of the last one.
DOUBT = {"float32": 2**-14, "bfloat16": 2**-4, "float16": 2**-7}
LEAST_DOUBT = 1e-4  # however small the logits are
MASKS_AT_ONCE = 256  # while planning: the masks of all squares together would fill the memory
TABLE_BYTES = 2**28  # for the sums of images that vote together
MOST_IMAGES = 8  # that vote together

LogitsOf = Callable[["Group", Tensor, Tensor], Logits]  # of rows: numbers of image and member


@dataclass(frozen=True, slots=True)
class Group:
    """Ablations that keep equally many tokens, in the order asked."""

    columns: Tensor  # (G,) where their votes go
    cells: CutCells | None  # their tokens; None: ablated images go through the whole model
    any_alone: bool = False  # some cell shows what no table holds


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked of every image; follows from the settings and the shape of the model alone."""

    bands: "Bands"
    groups: tuple[Group, ...]
    patterns: tuple[int, ...]  # that tables of partial tokens must hold


@dataclass(frozen=True, slots=True)
class Bands:
    """Visible pixels of chosen ablations, made when asked for."""

    ablations: Ablations
    corners: Tensor  # (K, 2) top row and left column; -1 where a side is not divided

    def __len__(self) -> int:
        return len(self.corners)

    def masks(self, index: Tensor) -> Tensor:
        """(R, H, W) bool; the same as those rows of `Ablations.masks`."""
        sides = [
            _band(self.corners[index, axis], side, self.ablations.band)
            for axis, side in enumerate(self.ablations.image_size)
        ]
        return sides[0][:, :, None] & sides[1][:, None, :]


def choose_bands(ablations: Ablations, order: Sequence[int], device: torch.device) -> Bands:
    """The ablations numbered `order`, in this order."""
    corners = [
        (-1 if rows is None else top, -1 if columns is None else left)
        for rows, columns in ablations.families
        for top in ablations.starts(rows)
        for left in ablations.starts(columns)
    ]
    return Bands(ablations, torch.tensor([corners[k] for k in order], device=device).view(-1, 2))


def _band(starts: Tensor, side: int, band: int) -> Tensor:
    """(R, side) bool: `band` lines from each start on, around the edge; all where it is -1."""
    lines = torch.arange(side, device=starts.device)
    return ((lines - starts[:, None]) % side < band) | (starts < 0)[:, None]


def ablation_predictions(
    model: PixelModel,
    images: Images,
    ablations: Ablations,
    *,
    micro_batch: int,
    order: Sequence[int] | None = None,
    precision: str = "float32",
    compiled: bool = False,
) -> Tensor:
    """(B, K) int64: argmax of every ablation, ties to the lowest class.

    `order` asks for these ablations only: column j is then the vote of ablation `order[j]`. At most
    `micro_batch` ablations are in one pass; like `precision` and `compiled` it changes the speed.
    """
    if model.training:
        raise ValueError("votes need eval mode: train-mode layers mix rows of a batch")
    if micro_batch < 1:
        raise ValueError(f"micro_batch must be at least 1, got {micro_batch}")
    if ablations.image_size != (model.spec.image_size,) * 2:
        raise ValueError(f"ablations of {ablations.image_size} do not fit the model's images")
    device = model.mean.device
    check_precision(precision, device)
    asked = tuple(range(len(ablations))) if order is None else tuple(order)
    plan = _plan(model, ablations, asked, in_cells=_embeds_cuts(model), device=device)
    votes = torch.empty(len(images), len(asked), dtype=torch.int64)
    together = _images_together(model, plan)
    with torch.inference_mode():
        for first in range(0, len(images), together):
            some = images[first : first + together].to(device)
            with _compiled_blocks(model.net, compiled), lean(model.net):
                found, in_doubt = _fast_votes(model, plan, some, micro_batch, precision, compiled)
            for row, column in in_doubt.nonzero():
                shown = plan.bands.masks(column[None])
                found[row, column] = model.forward_ablated(some[row, None], shown).argmax()
            votes[first : first + together] = found.cpu()
    return votes


def column_predictions(
    model: PixelModel, images: Images, *, band: int, stride: int, micro_batch: int
) -> Tensor:
    """(B, K) votes of all column ablations."""
    side = model.spec.image_size
    ablations = Ablations(kind="columns", image_size=(side, side), band=band, stride=stride)
    return ablation_predictions(model, images, ablations, micro_batch=micro_batch)


def check_precision(precision: str, device: torch.device) -> None:
    """Refuse what is unknown, or slower than float32: 16 bits on a processor without units for it.

    torch computes those by conversion, some ten times as slow.
    """
    if precision not in DOUBT:
        known = ", ".join(DOUBT)
        raise CasemateError("certify.precision", precision, f"is not one of {known}")
    if device.type != "cpu" or precision == "float32":
        return
    if precision == "float16" or not (
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    ):
        raise CasemateError(
            "certify.precision", precision, "has no units in this processor; use float32"
        )


def _fast_votes(
    model: PixelModel,
    plan: Plan,
    images: Images,
    micro_batch: int,
    precision: str,
    padded: bool,
) -> tuple[Tensor, Tensor]:
    """(B, K) argmax of fast logits, and whether rounding could have decided it."""
    votes = torch.empty(len(images), len(plan.bands), dtype=torch.int64, device=images.device)
    in_doubt = torch.zeros_like(votes, dtype=torch.bool)
    logits_of = _token_logits(model, plan, images) if plan.patterns else None
    logits_of = logits_of or partial(_image_logits, model, plan, images)
    dtype = getattr(torch, precision)
    with torch.autocast(images.device.type, dtype=dtype, enabled=precision != "float32"):
        for group in plan.groups:
            size = len(group.columns)
            for rows in torch.split(
                torch.arange(len(images) * size, device=images.device), micro_batch
            ):
                # compiled code knows one shape: the last pass repeats a row
                filled = torch.cat([rows, rows[:1].expand(padded * (micro_batch - len(rows)))])
                logits = logits_of(group, filled // size, filled % size)[: len(rows)].float()
                place = rows // size, group.columns[rows % size]
                votes[place] = logits.argmax(dim=1)
                in_doubt[place] = _is_close(logits, DOUBT[precision])
    return votes, in_doubt


def _is_close(logits: Logits, share: float) -> Tensor:
    """(B,) whether the two best logits are nearly equal; logits that are no numbers are too."""
    best = logits.topk(min(2, logits.shape[1]), dim=1).values
    doubt = (share * logits.abs().amax(dim=1)).clamp(min=LEAST_DOUBT)
    return ~(best[:, 0] - best[:, -1] >= doubt)


def _image_logits(
    model: PixelModel, plan: Plan, images: Images, group: Group, image: Tensor, member: Tensor
) -> Logits:
    """The general way, for any network: ablated images through the whole model."""
    return model.forward_ablated(images[image], plan.bands.masks(group.columns[member]))


def _token_logits(model: PixelModel, plan: Plan, images: Images) -> LogitsOf:
    """The way of vision transformers that drop tokens: kept tokens out of the images' table."""
    tokens = PartialTokens(
        model.net, model.resized(images), mean=model.mean, std=model.std, patterns=plan.patterns
    )

    def logits_of(group: Group, image: Tensor, member: Tensor) -> Logits:
        assert group.cells is not None
        shown = None
        if group.any_alone:
            shown = model.resized_mask(plan.bands.masks(group.columns[member]))
        return tokens.logits(group.cells.rows(member), image=image, visible=shown)

    return logits_of


def _embeds_cuts(model: PixelModel) -> bool:
    """Whether tokens may come from sums: resizing must commute with hiding pixels."""
    spec = model.spec
    return (
        spec.token_policy == "drop"
        and (spec.upsample is None or spec.upsample_mode == "nearest")
        and can_embed_cuts(model.net)
    )


@lru_cache(maxsize=4)  # holds its models: no more than a worker uses in turn
def _plan(
    model: PixelModel,
    ablations: Ablations,
    asked: tuple[int, ...],
    *,
    in_cells: bool,
    device: torch.device,
) -> Plan:
    bands = choose_bands(ablations, asked, device)
    columns = torch.arange(len(bands), device=device)
    if model.spec.token_policy == "mask":
        return Plan(bands, (Group(columns, None),), ())
    spans = torch.split(columns, MASKS_AT_ONCE)
    counts = torch.cat([model.kept_tokens(bands.masks(span)).sum(dim=1) for span in spans])
    members = [columns[counts == count] for count in sorted(set(counts.tolist()))]
    if not in_cells:
        return Plan(bands, tuple(Group(group, None) for group in members), ())
    groups = [_group(model, bands, group) for group in members]
    numbers = {n for g in groups if g.cells for n in g.cells.pattern.flatten().tolist()}
    return Plan(bands, tuple(groups), tuple(sorted(numbers - {ALONE} | {0})))


def _group(model: PixelModel, bands: Bands, columns: Tensor) -> Group:
    size = patch_size_of(model.net)
    parts = []
    for span in torch.split(columns, MASKS_AT_ONCE):
        masks = bands.masks(span)
        parts.append(cut_cells(model.resized_mask(masks), model.kept_tokens(masks), size))
    kept, pattern = torch.cat([p.kept for p in parts]), torch.cat([p.pattern for p in parts])
    return Group(columns, CutCells(kept, pattern), bool((pattern == ALONE).any()))


def _images_together(model: PixelModel, plan: Plan) -> int:
    """How many images share passes: as many as fill them, unless their tables are large."""
    if not plan.patterns:
        return MOST_IMAGES
    stem: Any = model.net.patch_embed
    bytes_each: int = 4 * len(plan.patterns) * stem.num_patches * stem.proj.out_channels
    return min(max(TABLE_BYTES // bytes_each, 1), MOST_IMAGES)


@contextmanager
def _compiled_blocks(net: nn.Module, compiled: bool) -> Iterator[None]:
    """Inside, the blocks of a transformer run as compiled code, where that is asked for.

    Not the last one: `lean` takes it apart.
    """
    blocks: Any = getattr(net, "blocks", ())
    with ExitStack() as stack:
        for block in blocks[:-1] if compiled else ():
            kind: Any = type(block)
            forward = partial(_compiled_forward(kind), block)
            stack.enter_context(shadowed(block, "forward", forward))
        yield


@cache
def _compiled_forward(kind: Any) -> Callable[..., Tensor]:
    """One compiled function for all blocks of a class: their weights are its arguments."""
    compiled: Callable[..., Tensor] = torch.compile(kind.forward, dynamic=False)
    return compiled
