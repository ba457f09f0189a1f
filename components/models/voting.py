"""Base classifiers that vote: one prediction for every ablation of an image.

A vote is the argmax, ties to the lowest class, of the float32 logits that `forward_ablated` gives
one ablated image by itself: certificates are statements about these votes. Everything else here
computes the same votes faster. Ablations that keep equally many tokens share a batch, also across
images; partly visible tokens come from sums (`partial_tokens`); the last block computes what the
head reads (`fast`), the others run on packed weights (`packed`) or compiled; 16-bit numbers are an
option. All of these move logits by rounding only, and where a row's two best logits are closer than
rounding usually explains, its vote is recomputed one by one. Networks that amplify rounding errors,
for example with very large attention weights, may still vote differently on single ablations; votes
never depend on hidden pixels. Units of work do not depend on the cluster: any number of workers
gives the same bytes.
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
from components.models.fast import fast_forward
from components.models.logits import check_logits
from components.models.packed import pack, packed_blocks
from components.models.partial_tokens import CutStem, PartialTokens
from components.models.pixels import PixelModel
from components.models.vote_plan import Group, embeds_cuts, plan_for

# A vote is recomputed if its two best logits are closer than this share of the largest one. In
# float32, other batch shapes and the sums move logits by some 1e-6 of it; numbers of 16 bits carry
# 8 (bfloat16) or 11 bits, and a dozen layers lose a few units of the last one.
TIE_TOLERANCE = {"float32": 2**-14, "bfloat16": 2**-4, "float16": 2**-7}
MIN_TIE_TOLERANCE = 1e-4  # for small logits
TABLE_BYTES = 2**28  # for the sums of images in the same passes
MOST_IMAGES = 8  # in the same passes
NUM_PROBES = 8  # ablations on which two backends are compared

Rows = tuple[Group, Tensor, Tensor]  # some ablations of a group: numbers of image and member


@dataclass(frozen=True, slots=True, kw_only=True)
class VotingBackend:
    """How votes are computed: affects cost, not meaning; recorded with the votes."""

    path: str  # fast, or plain: ablated images through the unchanged model
    precision: str  # of the blocks
    compiled: bool

    def __post_init__(self) -> None:
        if self.path not in ("fast", "plain"):
            raise ValueError(f"path must be fast or plain, got {self.path}")
        if self.precision not in TIE_TOLERANCE:
            remedy = f"is not one of {', '.join(TIE_TOLERANCE)}"
            raise CasemateError("certify.precision", self.precision, remedy)
        if self.path == "plain" and (self.compiled or self.precision != "float32"):
            raise ValueError("the plain path is float32 and not compiled")

    @property
    def fixed_shape(self) -> bool:
        """Whether all passes have the same number of rows; the last one is padded with a row.

        Compiled code has one shape; 16-bit rounding is coarse enough for other shapes to matter.
        """
        return self.compiled or self.precision != "float32"


FAST = VotingBackend(path="fast", precision="float32", compiled=False)
PLAIN = VotingBackend(path="plain", precision="float32", compiled=False)


class AblationPredictor:
    """Votes of a model, with its current weights, on the ablations of any image.

    At most `micro_batch` ablations are in one pass; like `backend` it only affects speed.
    """

    def __init__(
        self,
        model: PixelModel,
        ablations: Ablations,
        *,
        micro_batch: int,
        backend: VotingBackend = FAST,
    ) -> None:
        self.device = _check(model, ablations, micro_batch, backend)
        self.model, self.ablations, self.micro_batch, self.backend = (
            model,
            ablations,
            micro_batch,
            backend,
        )
        in_cells = backend.path == "fast" and embeds_cuts(model)
        self.plan = plan_for(model, ablations, in_cells=in_cells, device=self.device)
        self.weights = [part for part in model.parameters() if not part.is_inference()]
        self.versions = [part._version for part in self.weights]
        with torch.inference_mode():
            self.stem = self._stem() if self.plan.patterns else None
            self.packed = pack(model.net) if self.stem and backend == FAST else None

    def __call__(
        self,
        images: Images,
        order: Sequence[int] | None = None,
        *,
        item_ids: Sequence[str] | None = None,
    ) -> Tensor:
        """(B, K) int64: argmax of every ablation, ties to the lowest class.

        `order` selects ablations: column j is then the vote of ablation `order[j]`. An error names
        the item if logits are not finite: they are no vote.
        """
        self.model.spec.check_image(images.shape[1:])
        if self.model.training or self.versions != [part._version for part in self.weights]:
            raise ValueError("the model has changed; construct a new predictor")
        votes = torch.empty(len(images), len(self.ablations), dtype=torch.int64)
        requested, together = self._requested(order), self._images_together()
        names = item_ids or [str(row) for row in range(len(images))]
        with torch.inference_mode():
            for first in range(0, len(images), together):
                some = images[first : first + together].to(self.device)
                ids = names[first : first + together]
                found, nearly_tied = self._fast_votes(some, requested)
                for row, number in nearly_tied.nonzero():
                    shown = self.ablations.masks(number[None])
                    alone = self.model.forward_ablated(some[row, None], shown)
                    found[row, number] = check_logits(alone, ids[row : row + 1]).argmax()
                votes[first : first + together] = found.cpu()
        return votes if order is None else votes[:, list(order)]

    def difference_to_plain(self) -> float:
        """Largest difference of logits to the plain path, over the largest logit or 1.

        On noise, for a few ablations of every group. Rounding stays far below `TIE_TOLERANCE`; more
        means that the fast path does not support the network.
        """
        side, channels = self.model.spec.image_size, self.model.spec.channels
        noise = torch.rand(1, channels, side, side, generator=torch.Generator().manual_seed(0))
        image, worst = noise.to(self.device), 0.0
        with torch.inference_mode():
            for group in self.plan.groups:
                size = len(group.numbers)
                count = min(size, NUM_PROBES, self.micro_batch)
                member = torch.linspace(0, size - 1, count, device=self.device).long()
                rows = [(group, torch.zeros_like(member), member)]
                with self._faster():
                    found = self._pass(self._seen(image), rows)
                shown = self.ablations.masks(group.numbers[member])
                expected = self.model.forward_ablated(image.expand(count, -1, -1, -1), shown)
                known = expected.isfinite().all(dim=1)  # others are refused where votes are counted
                if known.any():
                    found, expected = found[known], expected[known]
                    gap = (found - expected).abs().max() / expected.abs().max().clamp(min=1)
                    worst = max(worst, float(torch.nan_to_num(gap, nan=torch.inf)))
        return worst

    def agrees_with_plain(self) -> bool:
        """Whether logits equal the plain path's up to half the tolerance: both logits may move."""
        return self.difference_to_plain() <= TIE_TOLERANCE[self.backend.precision] / 2

    def _stem(self) -> CutStem:
        model, patterns = self.model, self.plan.patterns
        return CutStem(model.net, mean=model.mean, std=model.std, patterns=patterns)

    def _requested(self, order: Sequence[int] | None) -> list[Tensor]:
        """Requested members of each group."""
        wanted = torch.full((len(self.ablations),), order is None, device=self.device)
        if order is not None:
            wanted[list(order)] = True
        return [wanted[group.numbers].nonzero()[:, 0] for group in self.plan.groups]

    def _images_together(self) -> int:
        """Number of images that share passes: enough to fill them, limited by table memory."""
        if self.stem is None:
            return MOST_IMAGES
        bytes_each = 4 * len(self.stem.patterns) * self.stem.positions.numel()
        return min(max(TABLE_BYTES // bytes_each, 1), MOST_IMAGES)

    def _fast_votes(self, images: Images, requested: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """(B, K) argmax of fast logits where requested, and whether it is nearly tied."""
        shape = len(images), len(self.ablations)
        votes = torch.zeros(shape, dtype=torch.int64, device=self.device)
        nearly_tied = torch.zeros_like(votes, dtype=torch.bool)
        with self._faster():
            seen = self._seen(images)
            for rows in self._passes(requested, len(images)):
                logits = self._pass(seen, rows)
                image = torch.cat([image for _, image, _ in rows])
                number = torch.cat([group.numbers[member] for group, _, member in rows])
                votes[image, number] = logits.argmax(dim=1)
                nearly_tied[image, number] = _is_close(
                    logits, TIE_TOLERANCE[self.backend.precision]
                )
        return votes, nearly_tied

    def _passes(self, requested: Sequence[Tensor], num_images: int) -> Iterator[list[Rows]]:
        """Passes of at most `micro_batch` rows of one group; packed: also remainders of several."""
        left: list[Rows] = []
        for group, members in zip(self.plan.groups, requested, strict=True):
            if not len(members):  # no member of this group is requested
                continue
            image = torch.arange(num_images, device=self.device).repeat_interleave(len(members))
            numbers = (image, members.repeat(num_images))
            for some in zip(*(torch.split(n, self.micro_batch) for n in numbers), strict=True):
                if not self.packed or len(some[0]) == self.micro_batch:
                    yield [(group, *some)]
                    continue
                if sum(len(rows[1]) for rows in left) + len(some[0]) > self.micro_batch:
                    yield left
                    left = []
                left.append((group, *some))
        if left:
            yield left

    def _seen(self, images: Images) -> PartialTokens | Images:
        """Input of the passes: the table of partial tokens if the plan has one, else the images."""
        return PartialTokens(self.stem, self.model.resized(images)) if self.stem else images

    def _pass(self, seen: PartialTokens | Images, rows: Sequence[Rows]) -> Logits:
        """Float32 logits of `rows`; a pass of fixed shape repeats its first row."""
        backend, count = self.backend, sum(len(image) for _, image, _ in rows)
        if backend.fixed_shape:
            rows = [_filled(some, self.micro_batch) for some in rows]
        dtype, enabled = getattr(torch, backend.precision), backend.precision != "float32"
        with torch.autocast(self.device.type, dtype=dtype, enabled=enabled):
            if isinstance(seen, Tensor):
                found = [self._image_logits(seen, *some) for some in rows]
            elif self.packed:
                found = self.packed([seen.tokens(**self._cells(*some)) for some in rows])
            else:
                found = [seen.logits(**self._cells(*some)) for some in rows]
        return torch.cat(found)[:count].float()

    def _image_logits(self, images: Images, group: Group, image: Tensor, member: Tensor) -> Logits:
        """For any network: ablated images through the whole model."""
        return self.model.forward_ablated(
            images[image], self.ablations.masks(group.numbers[member])
        )

    def _cells(self, group: Group, image: Tensor, member: Tensor) -> dict[str, Any]:
        """Arguments of `PartialTokens`, for vision transformers that drop tokens."""
        assert group.cells is not None
        shown = None
        if group.any_alone:
            shown = self.model.resized_mask(self.ablations.masks(group.numbers[member]))
        return {"cells": group.cells.rows(member), "image": image, "visible": shown}

    @contextmanager
    def _faster(self) -> Iterator[None]:
        """Speed up the network according to the backend; a packed one needs nothing."""
        net, backend = self.model.net, self.backend
        with ExitStack() as stack:
            if backend.compiled:
                stack.enter_context(_compiled_blocks(net))
            elif not self.packed and backend == FAST:
                stack.enter_context(packed_blocks(net))
            if not self.packed and backend.path == "fast":
                stack.enter_context(fast_forward(net))
            yield


def ablation_predictions(
    model: PixelModel,
    images: Images,
    ablations: Ablations,
    *,
    micro_batch: int,
    order: Sequence[int] | None = None,
    backend: VotingBackend = FAST,
) -> Tensor:
    """(B, K) votes of `AblationPredictor` on one set of images."""
    return AblationPredictor(model, ablations, micro_batch=micro_batch, backend=backend)(
        images, order
    )


def column_predictions(
    model: PixelModel, images: Images, *, band: int, stride: int, micro_batch: int
) -> Tensor:
    """(B, K) votes of all column ablations."""
    side = model.spec.image_size
    ablations = Ablations(kind="columns", image_size=(side, side), band=band, stride=stride)
    return ablation_predictions(model, images, ablations, micro_batch=micro_batch)


def check_precision(precision: str, device: torch.device) -> None:
    """Raise an error for 16 bits on a processor without 16-bit units: slower than float32.

    torch emulates them about ten times as slowly.
    """
    if device.type != "cpu" or precision == "float32":
        return
    if precision == "float16" or not (
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    ):
        raise CasemateError(
            "certify.precision", precision, "is not supported by this processor; use float32"
        )


def _check(
    model: PixelModel, ablations: Ablations, micro_batch: int, backend: VotingBackend
) -> torch.device:
    if model.training:
        raise ValueError("votes need eval mode: train-mode layers mix rows of a batch")
    if micro_batch < 1:
        raise ValueError(f"micro_batch must be at least 1, got {micro_batch}")
    if ablations.image_size != (model.spec.image_size,) * 2:
        raise ValueError(f"ablations of {ablations.image_size} do not fit the model's images")
    check_precision(backend.precision, model.mean.device)
    return model.mean.device


def _filled(rows: Rows, count: int) -> Rows:
    group, image, member = rows
    padding = torch.zeros(count - len(image), dtype=torch.int64, device=image.device)
    order = torch.cat([torch.arange(len(image), device=image.device), padding])
    return group, image[order], member[order]


def _is_close(logits: Logits, share: float) -> Tensor:
    """(B,) whether the two best logits are nearly equal; True if any is not finite."""
    best = logits.topk(min(2, logits.shape[1]), dim=1).values
    doubt = (share * logits.abs().amax(dim=1)).clamp(min=MIN_TIE_TOLERANCE)
    return ~(best[:, 0] - best[:, -1] >= doubt) | ~logits.isfinite().all(dim=1)


@contextmanager
def _compiled_blocks(net: nn.Module) -> Iterator[None]:
    """Compile the blocks of a transformer inside the context, except the last one."""
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
