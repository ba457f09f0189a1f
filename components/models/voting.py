"""Base classifiers that vote: one prediction for every ablation of an image.

A vote is the argmax, ties to the lowest class, of the float32 logits that `forward_ablated` gives
one ablated image by itself: that is what certificates are about. Everything else here is a faster
way to the same votes. Ablations that keep equally many tokens share a batch, also across images;
partly visible tokens come from sums (`partial_tokens`); the last block computes what the head reads
(`fast`), the others run on packed weights (`packed`) or compiled; 16-bit numbers are an option.
All of these move logits by rounding only, and where a row's two best logits are closer than
rounding could explain, its vote is taken again one by one. So votes depend neither on the other
images of a batch nor on its size: any number of workers gives the same bytes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from components.core.errors import CasemateError
from components.core.types import Images, Logits
from components.data.ablation import Ablations
from components.models.attention.shadow import shadowed
from components.models.fast import lean
from components.models.packed import joined_logits, packed_blocks, runs_joined
from components.models.partial_tokens import PartialTokens
from components.models.pixels import PixelModel
from components.models.vote_plan import Group, Plan, embeds_cuts, plan_for

# Two best logits closer than this share of the largest one are taken again. In float32, other batch
# shapes and the sums move logits by some 1e-6 of it; numbers of 16 bits carry 8 (bfloat16) or 11
# bits, and a dozen layers lose a few units of the last one.
DOUBT = {"float32": 2**-14, "bfloat16": 2**-4, "float16": 2**-7}
LEAST_DOUBT = 1e-4  # however small the logits are
TABLE_BYTES = 2**28  # for the sums of images that vote together
MOST_IMAGES = 8  # that vote together
NUM_PROBES = 8  # ablations on which two ways are compared

Rows = tuple[Group, Tensor, Tensor]  # some ablations of a group: numbers of image and member
LogitsOf = Callable[[Sequence[Rows]], list[Logits]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How votes are computed: changes their cost, not their meaning. Recorded with them."""

    path: str = "fast"  # plain: ablated images through the model as it is
    precision: str = "float32"  # of the blocks
    compiled: bool = False

    def __post_init__(self) -> None:
        if self.path not in ("fast", "plain"):
            raise ValueError(f"path must be fast or plain, got {self.path}")
        if self.precision not in DOUBT:
            remedy = f"is not one of {', '.join(DOUBT)}"
            raise CasemateError("certify.precision", self.precision, remedy)
        if self.path == "plain" and (self.compiled or self.precision != "float32"):
            raise ValueError("the plain path is float32 and not compiled")

    @property
    def fixed_shape(self) -> bool:
        """Whether every pass has the same number of rows: the last one repeats a row.

        Compiled code knows one shape; 16-bit rounding is coarse enough for other shapes to matter.
        """
        return self.compiled or self.precision != "float32"


FAST = Way()


def ablation_predictions(
    model: PixelModel,
    images: Images,
    ablations: Ablations,
    *,
    micro_batch: int,
    order: Sequence[int] | None = None,
    way: Way = FAST,
) -> Tensor:
    """(B, K) int64: argmax of every ablation, ties to the lowest class.

    `order` asks for these ablations only: column j is then the vote of ablation `order[j]`. At most
    `micro_batch` ablations are in one pass; like `way` it changes the speed.
    """
    device = _check(model, ablations, micro_batch, way)
    votes = torch.empty(len(images), len(ablations), dtype=torch.int64)
    plan = plan_for(model, ablations, in_cells=_in_cells(model, way), device=device)
    asked = _asked(plan, order, device)
    together = _images_together(model, plan)
    with torch.inference_mode():
        for first in range(0, len(images), together):
            some = images[first : first + together].to(device)
            with _faster(model.net, way):
                found, in_doubt = _quick_votes(model, plan, asked, some, micro_batch, way)
            for row, number in in_doubt.nonzero():
                shown = ablations.masks(number[None])
                found[row, number] = model.forward_ablated(some[row, None], shown).argmax()
            votes[first : first + together] = found.cpu()
    return votes if order is None else votes[:, list(order)]


def column_predictions(
    model: PixelModel, images: Images, *, band: int, stride: int, micro_batch: int
) -> Tensor:
    """(B, K) votes of all column ablations."""
    side = model.spec.image_size
    ablations = Ablations(kind="columns", image_size=(side, side), band=band, stride=stride)
    return ablation_predictions(model, images, ablations, micro_batch=micro_batch)


def difference_to_plain(
    model: PixelModel, ablations: Ablations, *, micro_batch: int, way: Way = FAST
) -> float:
    """Largest difference of logits between `way` and the plain path, over the largest logit or 1.

    On noise, for a few ablations of every group. Rounding stays far below `DOUBT`; more means that
    the network is not what the fast path takes it for.
    """
    device = _check(model, ablations, micro_batch, way)
    side, channels = model.spec.image_size, model.spec.channels
    noise = torch.rand(1, channels, side, side, generator=torch.Generator().manual_seed(0))
    image, worst = noise.to(device), 0.0
    plan = plan_for(model, ablations, in_cells=_in_cells(model, way), device=device)
    with torch.inference_mode():
        for group in plan.groups:
            size = len(group.numbers)
            count = min(size, NUM_PROBES, micro_batch)
            member = torch.linspace(0, size - 1, count, device=device).long()
            rows = [(group, torch.zeros_like(member), member)]
            with _faster(model.net, way):
                (found,) = _pass(_logits_of(model, plan, image), rows, micro_batch, way)
            shown = ablations.masks(group.numbers[member])
            expected = model.forward_ablated(image.expand(len(member), -1, -1, -1), shown)
            gap = (found - expected).abs().max() / expected.abs().max().clamp(min=1)
            worst = max(worst, float(torch.nan_to_num(gap, nan=torch.inf)))
    return worst


def agrees_with_plain(
    model: PixelModel, ablations: Ablations, *, micro_batch: int, way: Way = FAST
) -> bool:
    """Whether `way` gives the plain path's logits, up to rounding."""
    bound = 1e-4 if way.precision == "float32" else DOUBT[way.precision]
    return difference_to_plain(model, ablations, micro_batch=micro_batch, way=way) <= bound


def check_precision(precision: str, device: torch.device) -> None:
    """Refuse what is slower than float32: 16 bits on a processor without units for it.

    torch computes those by conversion, some ten times as slow.
    """
    if device.type != "cpu" or precision == "float32":
        return
    if precision == "float16" or not (
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    ):
        raise CasemateError(
            "certify.precision", precision, "has no units in this processor; use float32"
        )


def _check(model: PixelModel, ablations: Ablations, micro_batch: int, way: Way) -> torch.device:
    if model.training:
        raise ValueError("votes need eval mode: train-mode layers mix rows of a batch")
    if micro_batch < 1:
        raise ValueError(f"micro_batch must be at least 1, got {micro_batch}")
    if ablations.image_size != (model.spec.image_size,) * 2:
        raise ValueError(f"ablations of {ablations.image_size} do not fit the model's images")
    check_precision(way.precision, model.mean.device)
    return model.mean.device


def _in_cells(model: PixelModel, way: Way) -> bool:
    return way.path == "fast" and embeds_cuts(model)


def _asked(plan: Plan, order: Sequence[int] | None, device: torch.device) -> list[Tensor]:
    """For each group, which of its members are asked."""
    wanted = torch.full((len(plan.ablations),), order is None, device=device)
    if order is not None:
        wanted[list(order)] = True
    return [wanted[group.numbers].nonzero()[:, 0] for group in plan.groups]


def _quick_votes(
    model: PixelModel,
    plan: Plan,
    asked: Sequence[Tensor],
    images: Images,
    micro_batch: int,
    way: Way,
) -> tuple[Tensor, Tensor]:
    """(B, K) argmax of fast logits where asked, and whether rounding could have decided it."""
    shape = len(images), len(plan.ablations)
    votes = torch.zeros(shape, dtype=torch.int64, device=images.device)
    in_doubt = torch.zeros_like(votes, dtype=torch.bool)
    logits_of = _logits_of(model, plan, images)
    for rows in _passes(plan, asked, len(images), micro_batch, joined=_joins(model, way)):
        found = _pass(logits_of, rows, micro_batch, way)
        for (group, image, member), logits in zip(rows, found, strict=True):
            place = image, group.numbers[member]
            votes[place] = logits.argmax(dim=1)
            in_doubt[place] = _is_close(logits, DOUBT[way.precision])
    return votes, in_doubt


def _passes(
    plan: Plan, asked: Sequence[Tensor], num_images: int, micro_batch: int, *, joined: bool
) -> Iterator[list[Rows]]:
    """At most `micro_batch` rows of one group each; or of several, what is left of them."""
    left: list[Rows] = []
    for group, members in zip(plan.groups, asked, strict=True):
        if len(members) == 0:
            continue
        image = torch.arange(num_images, device=members.device).repeat_interleave(len(members))
        member = members.repeat(num_images)
        for some in zip(image.split(micro_batch), member.split(micro_batch), strict=True):
            if not len(some[0]):  # nothing is asked of this group
                continue
            if not joined or len(some[0]) == micro_batch:
                yield [(group, *some)]
                continue
            if sum(len(rows[1]) for rows in left) + len(some[0]) > micro_batch:
                yield left
                left = []
            left.append((group, *some))
    if left:
        yield left


def _pass(logits_of: LogitsOf, rows: Sequence[Rows], micro_batch: int, way: Way) -> list[Logits]:
    """Float32 logits of `rows`; a pass of fixed shape repeats its first row."""
    if way.fixed_shape:
        filled = [
            (group, *(torch.cat([n, n[:1].expand(micro_batch - len(n))]) for n in numbers))
            for group, *numbers in rows
        ]
    else:
        filled = list(rows)
    dtype, enabled = getattr(torch, way.precision), way.precision != "float32"
    with torch.autocast(rows[0][1].device.type, dtype=dtype, enabled=enabled):
        found = logits_of(filled)
    return [logits[: len(r[1])].float() for r, logits in zip(rows, found, strict=True)]


def _is_close(logits: Logits, share: float) -> Tensor:
    """(B,) whether the two best logits are nearly equal; logits that are no numbers are too."""
    best = logits.topk(min(2, logits.shape[1]), dim=1).values
    doubt = (share * logits.abs().amax(dim=1)).clamp(min=LEAST_DOUBT)
    return ~(best[:, 0] - best[:, -1] >= doubt)


def _joins(model: PixelModel, way: Way) -> bool:
    """Whether groups may share a pass."""
    return not way.fixed_shape and runs_joined(model.net)


def _logits_of(model: PixelModel, plan: Plan, images: Images) -> LogitsOf:
    """Kept tokens out of the images' table where the plan has one, else ablated images."""
    if plan.patterns:
        return _token_logits(model, plan, images)
    return partial(_image_logits, model, plan, images)


def _image_logits(
    model: PixelModel, plan: Plan, images: Images, rows: Sequence[Rows]
) -> list[Logits]:
    """The general way, for any network: ablated images through the whole model."""
    return [
        model.forward_ablated(images[image], plan.ablations.masks(group.numbers[member]))
        for group, image, member in rows
    ]


def _token_logits(model: PixelModel, plan: Plan, images: Images) -> LogitsOf:
    """The way of vision transformers that drop tokens."""
    tokens = PartialTokens(
        model.net, model.resized(images), mean=model.mean, std=model.std, patterns=plan.patterns
    )

    def ask(group: Group, image: Tensor, member: Tensor) -> dict[str, Any]:
        assert group.cells is not None
        shown = None
        if group.any_alone:
            shown = model.resized_mask(plan.ablations.masks(group.numbers[member]))
        return {"cells": group.cells.rows(member), "image": image, "visible": shown}

    def logits_of(rows: Sequence[Rows]) -> list[Logits]:
        if runs_joined(model.net):
            return joined_logits(model.net, [tokens.tokens(**ask(*some)) for some in rows])
        return [tokens.logits(**ask(*some)) for some in rows]

    return logits_of


def _images_together(model: PixelModel, plan: Plan) -> int:
    """How many images share passes: as many as fill them, unless their tables are large."""
    if not plan.patterns:
        return MOST_IMAGES
    stem: Any = model.net.patch_embed
    bytes_each: int = 4 * len(plan.patterns) * stem.num_patches * stem.proj.out_channels
    return min(max(TABLE_BYTES // bytes_each, 1), MOST_IMAGES)


@contextmanager
def _faster(net: nn.Module, way: Way) -> Iterator[None]:
    """Inside, `net` takes the savings of `way`."""
    with ExitStack() as stack:
        if way.compiled:
            stack.enter_context(_compiled_blocks(net))
        elif way.path == "fast" and way.precision == "float32":
            stack.enter_context(packed_blocks(net))
        if way.path == "fast":
            stack.enter_context(lean(net))
        yield


@contextmanager
def _compiled_blocks(net: nn.Module) -> Iterator[None]:
    """Inside, the blocks of a transformer run as compiled code; not the last one, `lean`'s."""
    blocks: Any = getattr(net, "blocks", ())
    with ExitStack() as stack:
        for block in blocks[:-1]:
            kind: Any = type(block)
            forward = partial(_compiled_forward(kind), block)
            stack.enter_context(shadowed(block, "forward", forward))
        yield


@cache
def _compiled_forward(kind: Any) -> Callable[..., Tensor]:
    """One compiled function for all blocks of a class: their weights are its arguments."""
    compiled: Callable[..., Tensor] = torch.compile(kind.forward, dynamic=False)
    return compiled
