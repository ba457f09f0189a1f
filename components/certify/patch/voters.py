"""Workers that compute patch votes: over ablations, and under all pairs of masks."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from components.certify.patch.double_masking import MaskSet
from components.certify.patch.early_stop import UNSEEN, certify_partial, voting_order
from components.certify.patch.evidence import EarlyStop
from components.certify.patch.settings import AblationSettings
from components.certify.tasks import VoteFields, VoteSettings, VoteTask, vote_row
from components.certify.vote_rows import SCHEMA
from components.core.micro_batch import fastest_micro_batch
from components.core.precision import check_precision
from components.core.types import Array
from components.core.units import Unit
from components.data.ablation import Ablations
from components.data.prepared import Split
from components.models.logits import check_independent_rows
from components.models.masked_votes import Masks, dense_chunks, masked_predictions
from components.models.pixels import PixelModel
from components.models.tokens import check_droppable
from components.models.voting import MOST_IMAGES, PLAIN, AblationPredictor, VotingBackend

VOTES_PER_UNIT = 1_280  # about a second of work for a small model
ITEMS_PER_UNIT = 20  # at most
ROWS = (16, 32, 64, 128, 256, 512, 1024, 2048)  # of a pass, tried where a recipe says auto


class PatchVoteFields(VoteFields):
    """The arguments that all classes of patch vote settings share."""

    token_policy: str | None
    trained_token_policy: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchVoteSettings(VoteSettings):
    """Settings that patch votes of all kinds depend on."""

    token_policy: str | None  # None: that of the model (first versions)
    trained_token_policy: str | None = None  # if it differs

    def to_dict(self) -> dict[str, object]:
        values = {**VoteSettings.to_dict(self), "token_policy": self.token_policy, "fill": "black"}
        if self.trained_token_policy is not None:
            values["trained_token_policy"] = self.trained_token_policy
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationVoteSettings(PatchVoteSettings):
    """Settings that votes over ablations depend on."""

    band: int
    stride: int
    backend: VotingBackend
    stop: EarlyStop | None = None

    def to_dict(self) -> dict[str, object]:
        values = PatchVoteSettings.to_dict(self)
        values |= {"band": self.band, "stride": self.stride, "way": asdict(self.backend)}
        return values | ({"stopped_for": self.stop.to_dict()} if self.stop else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class PairVoteSettings(PatchVoteSettings):
    """Settings that predictions under pairs of masks depend on."""

    mask_patch: int
    num_masks: int

    def to_dict(self) -> dict[str, object]:
        values = PatchVoteSettings.to_dict(self)
        return values | {"mask_patch": self.mask_patch, "num_masks": self.num_masks}


PatchVotesT = TypeVar("PatchVotesT", bound=PatchVoteSettings)
AblationTask = VoteTask[AblationVoteSettings]
PairTask = VoteTask[PairVoteSettings]


def image_size_of(task: VoteTask[PatchVotesT]) -> tuple[int, int]:
    """(height, width) of the images of a task."""
    dataset = task.open_data()
    return dataset.height, dataset.width


def voting_ablations(task: AblationTask) -> Ablations:
    """The ablations that vote."""
    votes, size = task.votes, image_size_of(task)
    return Ablations(kind=votes.kind, image_size=size, band=votes.band, stride=votes.stride)


def voting_masks(task: PairTask) -> MaskSet:
    """The masks whose pairs vote."""
    votes, size = task.votes, image_size_of(task)
    return MaskSet(image_size=size, patch=votes.mask_patch, num_masks=votes.num_masks)


def load_voting_model(task: VoteTask[PatchVotesT]) -> PixelModel:
    """The model with the token policy under which it votes."""
    votes = task.votes
    model = task.load_model()
    if votes.token_policy not in (None, model.spec.token_policy):
        if votes.token_policy == "drop":
            check_droppable(model.net)
        model.spec = replace(model.spec, token_policy=votes.token_policy)
    return model


def choose_backend(task: AblationTask, wanted: VotingBackend) -> VotingBackend:
    """The wanted backend; plain if the fast one gives different logits."""
    votes = task.votes
    check_precision(wanted.precision, votes.device, key="certify.precision")
    model, ablations = load_voting_model(task), voting_ablations(task)
    predictor = AblationPredictor(model, ablations, micro_batch=votes.micro_batch)
    return wanted if predictor.agrees_with_plain() else PLAIN


def fastest_rows(task: AblationTask) -> int:
    """Ablated images per pass that vote fastest: more of them where each keeps few tokens."""
    model, ablations, votes = load_voting_model(task), voting_ablations(task), task.votes
    spec = model.spec
    images = torch.rand(MOST_IMAGES, spec.channels, *ablations.image_size)

    def run(size: int) -> object:
        predict = AblationPredictor(model, ablations, micro_batch=size, backend=votes.backend)
        count = -(-size // len(ablations))
        order = torch.linspace(0, len(ablations) - 1, min(size, len(ablations))).long().tolist()
        return predict(images[:count], order if count == 1 else None)

    return fastest_micro_batch(run, _sizes(MOST_IMAGES * len(ablations)), device=votes.device)


def fastest_pairs(task: PairTask) -> int:
    """Masked images per pass that are classified fastest."""
    voter = PairVoter(task)
    item, largest = task.items().span(0, 1), max(voter.chunks, key=len)

    def run(size: int) -> object:
        numbers = largest[torch.arange(size) % len(largest)]
        return masked_predictions(voter.model, item.pixels(), voter.visible, chunks=[numbers])

    return fastest_micro_batch(run, _sizes(len(voter.visible)), device=task.votes.device)


def _sizes(most: int) -> list[int]:
    """Sizes of passes that are tried; more rows than there are votes fill no pass."""
    return [size for size in ROWS if size <= most] or [ROWS[0]]


def rows_to_fill(task: AblationTask, settings: AblationSettings) -> int:
    """Votes that a unit of work should have at least: a whole pass where its size was measured.

    Units of a given size stay as they were: unfinished runs have results of them.
    """
    return task.votes.micro_batch if settings.micro_batch == "auto" else 0


def check_votes_alone(model: PixelModel, masks: Masks, items: Split) -> None:
    """Reject a network that lets a vote depend on pixels which other votes see; on a few items."""
    device = model.mean.device
    shown = masks[torch.tensor([len(masks) // 2])][0].to(device)
    check_independent_rows(
        lambda images: model.forward_ablated(images, shown),
        items.span(0, min(len(items), 2)).pixels().to(device),
        network=model,
        name=model.spec.architecture,
    )


class AblationVoter:
    """Votes over the ablations of some items, which share passes through the model."""

    def __init__(self, task: AblationTask) -> None:
        self.settings, self.items = task.votes, task.items()
        self.model, self.ablations = load_voting_model(task), voting_ablations(task)
        check_votes_alone(self.model, self.ablations, self.items)
        self.predict = AblationPredictor(
            self.model,
            self.ablations,
            micro_batch=self.settings.micro_batch,
            backend=self.settings.backend,
        )
        if not self.predict.agrees_with_plain():
            raise RuntimeError(
                f"votes by {self.settings.backend} have different logits than the plain path here, "
                "but not where this run was planned; leave out certify's precision and compiled"
            )

    @property
    def masks(self) -> Masks:
        """What each vote sees."""
        return self.ablations

    def __call__(self, indices: Iterable[int]) -> pa.Table:
        items = [self.items.span(index, index + 1) for index in indices]
        images, ids = [item.pixels() for item in items], [item.item_ids[0] for item in items]
        votes = self.votes(torch.cat(images), ids)
        rows = [vote_row(i, self.ablations.kind, 0, v) for i, v in zip(items, votes, strict=True)]
        return pa.Table.from_pylist(rows, schema=SCHEMA)

    def votes(self, images: Tensor, item_ids: Sequence[str]) -> Array:
        """(B, K) uint16 of (B, C, H, W) images, UNSEEN where voting stopped early."""
        if self.settings.stop is not None:
            return self._until_decided(images, item_ids, self.settings.stop)
        return self.predict(images, item_ids=item_ids).numpy().astype(np.uint16)

    def _until_decided(self, images: Tensor, item_ids: Sequence[str], stop: EarlyStop) -> Array:
        """Votes by micro-batch until the outstanding ones cannot change a prediction or verdict."""
        order, step = voting_order(len(self.ablations)), self.settings.micro_batch
        votes = np.full((len(images), len(order)), UNSEEN, dtype=np.uint16)
        open_rows = np.arange(len(images))
        for start in range(0, len(order), step):
            batch = order[start : start + step]
            ids = [item_ids[row] for row in open_rows.tolist()]
            found = self.predict(images[open_rows], batch.tolist(), item_ids=ids)
            votes[np.ix_(open_rows, batch)] = found.numpy()
            undecided = [self._undecided(votes[open_rows], stop, rule) for rule in stop.rules]
            open_rows = open_rows[np.any(undecided, axis=0)]
            if not len(open_rows):
                break
        return votes

    def _undecided(self, votes: Array, stop: EarlyStop, rule: str) -> Array:
        claims = certify_partial(
            votes,
            self.ablations,
            num_classes=self.model.spec.num_classes,
            patch_sizes=stop.patch_sizes,
            rule=rule,
        )
        return claims.undecided


class PairVoter:
    """Predictions under all pairs of masks of some items."""

    def __init__(self, task: PairTask) -> None:
        self.items, self.mask_set = task.items(), voting_masks(task)
        self.model = load_voting_model(task)
        self.visible = self.mask_set.visible(self.mask_set.pairs())
        check_votes_alone(self.model, self.visible, self.items)
        self.chunks = dense_chunks(self.model, self.visible, micro_batch=task.votes.micro_batch)

    @property
    def masks(self) -> Masks:
        """What each vote sees."""
        return self.visible

    def __call__(self, indices: Iterable[int]) -> pa.Table:
        rows = []
        for index in indices:
            item = self.items.span(index, index + 1)
            votes = self.votes(item.pixels(), item.item_ids)
            rows.append(vote_row(item, "pairs", 0, votes))
        return pa.Table.from_pylist(rows, schema=SCHEMA)

    def votes(self, image: Tensor, item_ids: Sequence[str] | None = None) -> Array:
        """(Q,) uint16 of one (1, C, H, W) image."""
        votes = masked_predictions(
            self.model, image, self.visible, chunks=self.chunks, item_ids=item_ids
        )
        return votes[0].numpy().astype(np.uint16)


def item_units(num_items: int, *, num_votes: int, rows: int = 0) -> list[Unit]:
    """Units of several items each, with at least `rows` votes where MOST_IMAGES have as many."""
    step = max(1, min(ITEMS_PER_UNIT, VOTES_PER_UNIT // num_votes))
    step = max(step, min(-(-rows // num_votes), MOST_IMAGES))
    spans = [range(i, min(i + step, num_items)) for i in range(0, num_items, step)]
    return [
        Unit(
            f"items-{s.start:08d}",
            f"test items {s.start}..{s.stop - 1}",
            tuple(s),
            len(s),
            num_votes * len(s),
        )
        for s in spans
    ]
