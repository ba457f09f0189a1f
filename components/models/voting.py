"""Base classifiers that vote: one prediction for every ablation of an image.

A vote is the argmax, ties to the lowest class, of the float32 logits that `forward_ablated` gives
one ablated image by itself: that is what certificates are about. Everything else here is a faster
way to the same votes. Ablations that keep equally many tokens share a batch, also across images;
partly visible tokens come from sums (`partial_tokens`); the last block computes what the head reads
(`fast`), the others run on packed weights (`packed`) or compiled; 16-bit numbers are an option.
All of these move logits by rounding only, and where a row's two best logits are closer than
rounding usually explains, its vote is taken again one by one. Networks that blow rounding up, as
with attention weights several times the usual ones, may still vote otherwise on single ablations;
hidden pixels never reach a vote. Units of work are cut the same way everywhere: any number of
workers gives the same bytes.
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
from components.models.packed import pack, packed_blocks
from components.models.partial_tokens import CutStem, PartialTokens
from components.models.pixels import PixelModel
from components.models.vote_plan import Group, embeds_cuts, plan_for

# Two best logits closer than this share of the largest one are taken again. In float32, other batch
# shapes and the sums move logits by some 1e-6 of it; numbers of 16 bits carry 8 (bfloat16) or 11
# bits, and a dozen layers lose a few units of the last one.
DOUBT = {"float32": 2**-14, "bfloat16": 2**-4, "float16": 2**-7}
LEAST_DOUBT = 1e-4  # however small the logits are
TABLE_BYTES = 2**28  # for the sums of images that vote together
MOST_IMAGES = 8  # that vote together
NUM_PROBES = 8  # ablations on which two backends are compared

Rows = tuple[Group, Tensor, Tensor]  # some ablations of a group: numbers of image and member


@dataclass(frozen=True, slots=True, kw_only=True)
class VotingBackend:
    """How votes are computed: changes their cost, not their meaning. Recorded with them."""

    path: str  # fast, or plain: ablated images through the unchanged model
    precision: str  # of the blocks
    compiled: bool

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


FAST = VotingBackend(path="fast", precision="float32", compiled=False)
PLAIN = VotingBackend(path="plain", precision="float32", compiled=False)


class AblationPredictor:
    """A model ready to vote on the ablations of any image, with its weights as they are now.

    At most `micro_batch` ablations are in one pass; like `backend` it changes the speed.
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

    def __call__(self, images: Images, order: Sequence[int] | None = None) -> Tensor:
        """(B, K) int64: argmax of every ablation, ties to the lowest class.

        `order` asks for these ablations only: column j is then the vote of ablation `order[j]`.
        """
        self.model.spec.check_image(images.shape[1:])
        if self.model.training or self.versions != [part._version for part in self.weights]:
            raise ValueError("the model has changed since; make a predictor anew")
        votes = torch.empty(len(images), len(self.ablations), dtype=torch.int64)
        asked, together = self._asked(order), self._images_together()
        with torch.inference_mode():
            for first in range(0, len(images), together):
                some = images[first : first + together].to(self.device)
                found, in_doubt = self._quick_votes(some, asked)
                for row, number in in_doubt.nonzero():
                    shown = self.ablations.masks(number[None])
                    found[row, number] = self.model.forward_ablated(some[row, None], shown).argmax()
                votes[first : first + together] = found.cpu()
        return votes if order is None else votes[:, list(order)]

    def difference_to_plain(self) -> float:
        """Largest difference of logits to the plain path, over the largest logit or 1.

        On noise, for a few ablations of every group. Rounding stays far below `DOUBT`; more means
        that the network is not what the fast path takes it for.
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
                gap = (found - expected).abs().max() / expected.abs().max().clamp(min=1)
                worst = max(worst, float(torch.nan_to_num(gap, nan=torch.inf)))
        return worst

    def agrees_with_plain(self) -> bool:
        """Whether logits are the plain path's, up to rounding: two may move towards each other."""
        return self.difference_to_plain() <= DOUBT[self.backend.precision] / 2

    def _stem(self) -> CutStem:
        model, patterns = self.model, self.plan.patterns
        return CutStem(model.net, mean=model.mean, std=model.std, patterns=patterns)

    def _asked(self, order: Sequence[int] | None) -> list[Tensor]:
        """For each group, which of its members are asked."""
        wanted = torch.full((len(self.ablations),), order is None, device=self.device)
        if order is not None:
            wanted[list(order)] = True
        return [wanted[group.numbers].nonzero()[:, 0] for group in self.plan.groups]

    def _images_together(self) -> int:
        """How many images share passes: as many as fill them, unless their tables are large."""
        if self.stem is None:
            return MOST_IMAGES
        bytes_each = 4 * len(self.stem.patterns) * self.stem.positions.numel()
        return min(max(TABLE_BYTES // bytes_each, 1), MOST_IMAGES)

    def _quick_votes(self, images: Images, asked: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """(B, K) argmax of fast logits where asked, and whether rounding could have decided it."""
        shape = len(images), len(self.ablations)
        votes = torch.zeros(shape, dtype=torch.int64, device=self.device)
        in_doubt = torch.zeros_like(votes, dtype=torch.bool)
        with self._faster():
            seen = self._seen(images)
            for rows in self._passes(asked, len(images)):
                logits = self._pass(seen, rows)
                image = torch.cat([image for _, image, _ in rows])
                number = torch.cat([group.numbers[member] for group, _, member in rows])
                votes[image, number] = logits.argmax(dim=1)
                in_doubt[image, number] = _is_close(logits, DOUBT[self.backend.precision])
        return votes, in_doubt

    def _passes(self, asked: Sequence[Tensor], num_images: int) -> Iterator[list[Rows]]:
        """At most `micro_batch` rows of one group each; packed, also what is left of several."""
        left: list[Rows] = []
        for group, members in zip(self.plan.groups, asked, strict=True):
            if not len(members):  # nothing is asked of this group
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
        """What passes read: the images' table where the plan has one, else the images."""
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
        """What tables of partial tokens are asked, by vision transformers that drop tokens."""
        assert group.cells is not None
        shown = None
        if group.any_alone:
            shown = self.model.resized_mask(self.ablations.masks(group.numbers[member]))
        return {"cells": group.cells.rows(member), "image": image, "visible": shown}

    @contextmanager
    def _faster(self) -> Iterator[None]:
        """Inside, the network takes the savings of its backend; packed as a whole, it has them."""
        net, backend = self.model.net, self.backend
        with ExitStack() as stack:
            if backend.compiled:
                stack.enter_context(_compiled_blocks(net))
            elif not self.packed and backend == FAST:
                stack.enter_context(packed_blocks(net))
            if not self.packed and backend.path == "fast":
                stack.enter_context(lean(net))
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
    """(B, K) votes of one set of images, as `AblationPredictor` takes them."""
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
    """(B,) whether the two best logits are nearly equal; logits that are no numbers are too."""
    best = logits.topk(min(2, logits.shape[1]), dim=1).values
    doubt = (share * logits.abs().amax(dim=1)).clamp(min=LEAST_DOUBT)
    return ~(best[:, 0] - best[:, -1] >= doubt)


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
