"""Base classifiers that vote: one prediction for every ablation of an image.

A vote is the argmax, ties to the lowest class, of the float32 logits that `forward_ablated` gives
one ablated image by itself: certificates are statements about these votes. Everything else here
computes the same votes faster. Ablations that keep equally many tokens share a batch, also across
images; partly visible tokens come from sums (`partial_tokens`); the last block computes what the
head reads (`fast`), the others run on packed weights (`packed`) or compiled; 16-bit numbers are an
option. All of these move logits by rounding only, and where a row's two best logits are closer than
rounding usually explains, its vote is recomputed: that of a reduced precision in float32 first, in
batches, and what is still close one by one. Networks that amplify rounding errors,
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

from components.core.arithmetic import in_use, using
from components.core.errors import CasemateError
from components.core.evaluations import EVALUATIONS
from components.core.precision import check_precision, reduced, switches_of
from components.core.transfers import sent
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
# float32, other batch shapes and the sums move logits by some 1e-6 of it; reduced numbers carry 8
# (bfloat16) or 11 bits (float16, tf32), and a dozen layers lose a few units of the last one.
TIE_TOLERANCE = {"float32": 2**-14, "tf32": 2**-7, "bfloat16": 2**-4, "float16": 2**-7}
MIN_TIE_TOLERANCE = 1e-4  # for small logits
TABLE_BYTES = 2**28  # for the sums of images in the same passes
FEW_IMAGES, MOST_IMAGES = 8, 64  # in the same passes
NUM_PROBES = 8  # ablations on which two backends are compared

HOST = torch.device("cpu")
Rows = tuple[Group, Tensor, Tensor]  # some ablations of a group: numbers of image and member, host


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
        self.plan = plan_for(model, ablations, in_cells=in_cells, device=HOST)
        self.weights = [part for part in model.parameters() if not part.is_inference()]
        self.versions = [part._version for part in self.weights]
        with torch.inference_mode():
            self.stem = self._stem() if self.plan.patterns else None
            self.packed = pack(model.net) if self.stem and backend == FAST else None
        self.exact: AblationPredictor | None = None  # decides what a reduced precision cannot
        if backend.precision != "float32":
            self.exact = AblationPredictor(model, ablations, micro_batch=micro_batch)

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
        names = item_ids or [str(row) for row in range(len(images))]
        with torch.inference_mode():
            votes, nearly_tied = self._fast_votes(images, self._requested(order))
            close = nearly_tied.cpu().nonzero()
            if self.exact is not None:
                close = self.exact._decide(votes, images, close)
            self._decide_alone(votes, images, close, names)
            found = votes.cpu()
        return found if order is None else found[:, list(order)]

    def _decide(self, votes: Tensor, images: Images, close: Tensor) -> Tensor:
        """Vote again on (n, 2) numbers of image and ablation; those that are still nearly tied."""
        doubtful = torch.zeros(votes.shape, dtype=torch.bool)
        doubtful[close.unbind(1)] = True
        rows = doubtful.any(dim=1).nonzero()[:, 0]
        found, nearly_tied = self._fast_votes(images[rows], doubtful[rows])
        changed, at = sent(doubtful[rows], self.device), sent(rows, self.device)
        votes[at] = torch.where(changed, found, votes[at])
        place, number = nearly_tied.cpu().nonzero().unbind(1)
        return torch.stack([rows[place], number], dim=1)

    def _decide_alone(
        self, votes: Tensor, images: Images, close: Tensor, names: Sequence[str]
    ) -> None:
        """Vote on numbers of image and ablation one by one, which is how votes are defined."""
        if not len(close):
            return
        logits = []
        for row, number in close:
            shown = self.ablations.masks(sent(number[None], self.device))
            logits.append(self.model.forward_ablated(sent(images[row, None], self.device), shown))
        checked = check_logits(torch.cat(logits), [names[row] for row in close[:, 0].tolist()])
        votes[sent(close, self.device).unbind(1)] = checked.argmax(dim=1)

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
                member = torch.linspace(0, size - 1, count).long()
                rows = [(group, torch.zeros_like(member), member)]
                with self._faster():
                    found = self._pass(self._seen(image), rows)
                shown = self.ablations.masks(sent(group.numbers[member], self.device))
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

    def _requested(self, order: Sequence[int] | None) -> Tensor:
        """(K,) which ablations vote, on the host as all plans."""
        wanted = torch.full((len(self.ablations),), order is None)
        if order is not None:
            wanted[list(order)] = True
        return wanted

    def _images_together(self, votes_each: int) -> int:
        """Number of images that share passes: enough to fill them, limited by table memory."""
        enough = max(FEW_IMAGES, -(-self.micro_batch // max(votes_each, 1)))
        if self.stem is None:
            return min(enough, MOST_IMAGES)
        bytes_each = 4 * len(self.stem.patterns) * self.stem.positions.numel()
        return min(max(TABLE_BYTES // bytes_each, 1), enough, MOST_IMAGES)

    def _fast_votes(self, images: Images, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """(B, K) argmax of fast logits, and whether it is nearly tied; 0 and False elsewhere.

        `wanted`, (K,) or (B, K) bool on the host, names the votes. Nothing waits for the device.
        """
        shape = len(images), len(self.ablations)
        votes = torch.zeros(shape, dtype=torch.int64, device=self.device)
        nearly_tied = torch.zeros_like(votes, dtype=torch.bool)
        asked = wanted.expand(shape)
        together = self._images_together(-(-int(asked.sum()) // max(len(images), 1)))
        with self._faster():
            for first in range(0, len(images), together):
                some = slice(first, first + together)
                if asked[some].any():
                    self._vote(images[some], asked[some], votes[some], nearly_tied[some])
        return votes, nearly_tied

    def _vote(self, images: Images, asked: Tensor, votes: Tensor, nearly_tied: Tensor) -> None:
        """Fill in votes of images whose sums are in memory together."""
        seen, logits = self._seen(sent(images, self.device)), []
        rows: list[Rows] = []
        for some in self._passes(asked):
            logits.append(self._pass(seen, some))
            EVALUATIONS.add(len(logits[-1]))
            rows += some
        image = torch.cat([image for _, image, _ in rows])
        number = torch.cat([group.numbers[member] for group, _, member in rows])
        at = sent(torch.stack([image, number]), self.device).unbind()
        found = torch.cat(logits)
        votes[at] = found.argmax(dim=1)
        nearly_tied[at] = _is_close(found, TIE_TOLERANCE[self.backend.precision])

    def _passes(self, asked: Tensor) -> Iterator[list[Rows]]:
        """Passes of at most `micro_batch` rows of one group; packed: also remainders of several."""
        left: list[Rows] = []
        for group in self.plan.groups:
            numbers = asked[:, group.numbers].nonzero(as_tuple=True)  # of image and member
            if not len(numbers[0]):
                continue
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
        with reduced(backend.precision, self.device.type):
            if isinstance(seen, Tensor):
                found = [self._image_logits(seen, *some) for some in rows]
            elif self.packed:
                found = self.packed([seen.tokens(**self._cells(*some)) for some in rows])
            else:
                found = [seen.logits(**self._cells(*some)) for some in rows]
        return torch.cat(found)[:count].float()

    def _image_logits(self, images: Images, group: Group, image: Tensor, member: Tensor) -> Logits:
        """For any network: ablated images through the whole model."""
        image, number = sent(torch.stack([image, group.numbers[member]]), self.device).unbind()
        return self.model.forward_ablated(images[image], self.ablations.masks(number))

    def _cells(self, group: Group, image: Tensor, member: Tensor) -> dict[str, Any]:
        """Arguments of `PartialTokens`, for vision transformers that drop tokens."""
        assert group.cells is not None
        shown = None
        if group.any_alone:
            number = sent(group.numbers[member], self.device)
            shown = self.model.resized_mask(self.ablations.masks(number))
        return {"cells": group.cells.rows(member), "image": image, "visible": shown}

    @contextmanager
    def _faster(self) -> Iterator[None]:
        """Speed up the network according to the backend; a packed one needs nothing."""
        net, backend = self.model.net, self.backend
        with ExitStack() as stack:
            if backend.precision == "tf32":
                stack.enter_context(using(switches_of("tf32", in_use())))
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


def _check(
    model: PixelModel, ablations: Ablations, micro_batch: int, backend: VotingBackend
) -> torch.device:
    if model.training:
        raise ValueError("votes need eval mode: train-mode layers mix rows of a batch")
    if micro_batch < 1:
        raise ValueError(f"micro_batch must be at least 1, got {micro_batch}")
    if ablations.image_size != (model.spec.image_size,) * 2:
        raise ValueError(f"ablations of {ablations.image_size} do not fit the model's images")
    check_precision(backend.precision, model.mean.device.type, key="certify.precision")
    return model.mean.device


def _filled(rows: Rows, count: int) -> Rows:
    group, image, member = rows
    padding = torch.zeros(count - len(image), dtype=torch.int64)
    order = torch.cat([torch.arange(len(image)), padding])
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
