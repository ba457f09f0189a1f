"""Workers that produce votes: what runs on an actor, in a test and in `verify --resample` alike."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from components.certify.l2.noise import float32_at_least, predict_block
from components.certify.l2.sequential import choose_class
from components.certify.l2.settings import GaussianSettings
from components.certify.patch.double_masking import MaskSet
from components.certify.patch.early_stop import UNSEEN, certify_partial, voting_order
from components.certify.patch.settings import AblationSettings, DoubleMaskingSettings
from components.certify.settings import CertificateSettings
from components.certify.votes import SCHEMA, image_digest
from components.core.seeding import noise_stream
from components.core.settings import plain
from components.core.types import Array
from components.core.units import Unit, WorkFn
from components.data.ablation import Ablations
from components.data.prepared import ImageSplit, PreparedDataset, Split
from components.denoising.classifier import DenoisedClassifier
from components.denoising.loading import (
    denoiser_of,
    describe_source,
    load_denoised,
    source_digest,
)
from components.models.checkpoint import load_model
from components.models.masked_votes import dense_chunks, masked_predictions
from components.models.networks.unet import TimedUNet
from components.models.pixels import PixelModel
from components.models.tokens import check_droppable
from components.models.voting import FAST, AblationPredictor, Way, check_precision

VOTES_PER_UNIT = 1_280  # of patches: about a second of work for a small model
ITEMS_PER_UNIT = 20  # at most


@dataclass(frozen=True, slots=True)
class VoteConfig:
    """Places and settings; `band`, `token_policy` and `way` are resolved."""

    dataset: Path
    model: Path
    section: CertificateSettings
    band: int | None
    seed: int
    device: str
    token_policy: str | None = None  # None: the model's own
    way: Way = FAST  # of ablations
    denoiser: str | None = None  # the source of what stands in front of the model

    def ablations(self) -> Ablations:
        """The ablations that vote."""
        section, dataset = self.section, PreparedDataset.open(self.dataset)
        assert isinstance(section, AblationSettings)
        assert self.band is not None
        size = (dataset.height, dataset.width)
        return Ablations(kind=section.kind, image_size=size, band=self.band, stride=section.stride)

    def masks(self) -> MaskSet:
        """The masks whose pairs vote."""
        section, dataset = self.section, PreparedDataset.open(self.dataset)
        assert isinstance(section, DoubleMaskingSettings)
        size = (dataset.height, dataset.width)
        return MaskSet(image_size=size, patch=section.mask_patch, num_masks=section.num_masks)


def denoiser_settings(config: VoteConfig) -> dict[str, Any]:
    """What stands in front of the model, and how noise is added and announced to it."""
    if config.denoiser is None:
        return {}
    section, found = config.section, describe_source(config.denoiser)
    assert isinstance(section, GaussianSettings)
    side = PreparedDataset.open(config.dataset).height
    network = found.network(image_size=side, channels=found.channels)
    assert isinstance(network, TimedUNet)
    return {
        "denoiser": {
            "digest": source_digest(config.denoiser),
            "sampler": plain(section.sampler),
            "prediction": found.diffusion.prediction,
            "timestep": denoiser_of(network, found.diffusion).timestep(2 * section.sigma),
            "sigma_added": float(float32_at_least(section.sigma)),
        }
    }


@dataclass(frozen=True, slots=True)
class Block:
    """Draws `start..stop-1` of one stream of one test item."""

    item: int
    stream: str
    start: int
    stop: int


class AblationVoter:
    """Votes over the ablations of some items, which share passes through the model."""

    def __init__(self, config: VoteConfig) -> None:
        assert isinstance(config.section, AblationSettings)
        self.config, self.section, self.items = config, config.section, load_items(config)
        self.model, self.ablations = load_voting_model(config), config.ablations()
        self.ask = AblationPredictor(
            self.model, self.ablations, micro_batch=self.section.micro_batch, way=config.way
        )
        if not self.ask.agrees_with_plain():
            raise RuntimeError(
                f"votes by {config.way} have other logits than the plain path here, though not "
                "where this run was planned; leave out certify's precision and compiled"
            )

    def __call__(self, indices: Iterable[int]) -> pa.Table:
        items = [self.items.span(index, index + 1) for index in indices]
        votes = self.votes(torch.cat([item.pixels() for item in items]))
        rows = [_row(i, self.ablations.kind, 0, v) for i, v in zip(items, votes, strict=True)]
        return pa.Table.from_pylist(rows, schema=SCHEMA)

    def votes(self, images: Tensor) -> Array:
        """(B, K) uint16 of (B, C, H, W) images, UNSEEN where voting stopped before."""
        if self.section.stop_early:
            return self._until_decided(images)
        return self.ask(images).numpy().astype(np.uint16)

    def _until_decided(self, images: Tensor) -> Array:
        """Micro-batch by micro-batch, until no vote left can change a prediction or a verdict."""
        order, step = voting_order(len(self.ablations)), self.section.micro_batch
        votes = np.full((len(images), len(order)), UNSEEN, dtype=np.uint16)
        open_rows = np.arange(len(images))
        for start in range(0, len(order), step):
            asked = order[start : start + step]
            found = self.ask(images[open_rows], asked.tolist())
            votes[np.ix_(open_rows, asked)] = found.numpy()
            undecided = [self._undecided(votes[open_rows], rule) for rule in rules_of(self.section)]
            open_rows = open_rows[np.any(undecided, axis=0)]
            if not len(open_rows):
                break
        return votes

    def _undecided(self, votes: Array, rule: str) -> Array:
        claims = certify_partial(
            votes,
            self.ablations,
            num_classes=self.model.spec.num_classes,
            patch_sizes=self.section.patch_sizes,
            rule=rule,
        )
        return claims.undecided


class PairVoter:
    """Predictions under all pairs of masks of some items."""

    def __init__(self, config: VoteConfig) -> None:
        self.config, self.items = config, load_items(config)
        self.model, self.masks = load_voting_model(config), config.masks()
        self.visible = self.masks.visible(self.masks.pairs())
        self.chunks = dense_chunks(self.model, self.visible, micro_batch=config.section.micro_batch)

    def __call__(self, indices: Iterable[int]) -> pa.Table:
        rows = []
        for index in indices:
            item = self.items.span(index, index + 1)
            rows.append(_row(item, "pairs", 0, self.votes(item.pixels())))
        return pa.Table.from_pylist(rows, schema=SCHEMA)

    def votes(self, image: Tensor) -> Array:
        """(Q,) uint16 of one (1, C, H, W) image."""
        votes = masked_predictions(self.model, image, self.visible, chunks=self.chunks)
        return votes[0].numpy().astype(np.uint16)


class GaussianVoter:
    """Blocks of noisy draws of some items."""

    def __init__(self, config: VoteConfig) -> None:
        self.config = config
        self.items = load_items(config)
        self.num_classes = len(PreparedDataset.open(config.dataset).classes)
        self.model = load_noisy_model(config)

    def __call__(self, blocks: Iterable[Block]) -> pa.Table:
        section = self.config.section
        assert isinstance(section, GaussianSettings)
        rows = []
        for b in blocks:
            item = self.items.span(b.item, b.item + 1)
            chosen = section.method == "sequential" and b.stream == "select"
            predictions = self._select(item, b) if chosen else self.predictions(item, b)
            rows.append(_row(item, b.stream, b.start, predictions))
        return pa.Table.from_pylist(rows, schema=SCHEMA)

    def predictions(self, item: ImageSplit, b: Block) -> Array:
        """(stop - start,) uint16 of one item."""
        section = self.config.section
        assert isinstance(section, GaussianSettings)
        return predict_block(
            self.model,
            item.pixels()[0],
            sigma=section.sigma,
            run_seed=self.config.seed,
            stream=noise_stream(section.method, b.stream),
            item_id=item.item_ids[0],
            start=b.start,
            stop=b.stop,
            micro_batch=section.micro_batch,
            device=self.config.device,
        )

    def _select(self, item: ImageSplit, b: Block) -> Array:
        """Selecting draws up to the look at which one class leads clearly, at most all of them."""
        found, step = np.empty(0, np.uint16), self.config.section.micro_batch
        for start in range(0, b.stop, step):
            part = replace(b, start=start, stop=min(start + step, b.stop))
            found = np.concatenate([found, self.predictions(item, part)])
            selection = choose_class(found, num_classes=self.num_classes, num_select=b.stop)
            if selection:
                return found[: selection.n0]
        raise AssertionError("the last look always chooses")


def make_voter(config: VoteConfig) -> WorkFn:
    """The voter of a certify section."""
    match config.section:
        case AblationSettings():
            return AblationVoter(config)
        case DoubleMaskingSettings():
            return PairVoter(config)
        case GaussianSettings():
            return GaussianVoter(config)
    raise ValueError(f"no voter for {config.section.kind}")


def rules_of(section: AblationSettings) -> list[str]:
    """The rules under which a certificate gives verdicts."""
    return [section.rule, *([section.second_rule] if section.second_rule != "none" else [])]


def load_items(config: VoteConfig) -> Split:
    """The test items: in memory where they fit, else read shard by shard."""
    return PreparedDataset.open(config.dataset).open_split("test")


def load_voting_model(config: VoteConfig) -> PixelModel:
    """The model with the token policy under which it votes."""
    model = load_model(config.model, device=config.device)
    if config.token_policy not in (None, model.spec.token_policy):
        if config.token_policy == "drop":
            check_droppable(model.net)
        model.spec = replace(model.spec, token_policy=config.token_policy)
    return model


def load_noisy_model(config: VoteConfig) -> PixelModel | DenoisedClassifier:
    """What classifies noisy images: the model itself, or behind its denoiser."""
    section = config.section
    assert isinstance(section, GaussianSettings)
    if config.denoiser is None:
        return load_model(config.model, device=config.device)
    return load_denoised(
        config.model,
        config.denoiser,
        sampler=plain(section.sampler),
        image_size=PreparedDataset.open(config.dataset).width,
        sigma=section.sigma,
        device=config.device,
    )


def choose_way(config: VoteConfig) -> Way:
    """The settings' way to the votes of ablations; plain where the fast one has other logits.

    Decided once, before work is spread: all workers vote alike and the votes record how.
    """
    section = config.section
    if not isinstance(section, AblationSettings):
        return FAST
    check_precision(section.precision, torch.device(config.device))
    model, ablations = load_voting_model(config), config.ablations()
    predictor = AblationPredictor(model, ablations, micro_batch=section.micro_batch)
    if not predictor.agrees_with_plain():
        return Way(path="plain")
    return Way(precision=section.precision, compiled=section.compiled)


def plan_votes(config: VoteConfig, *, num_items: int) -> list[Unit]:
    """The units of work: they follow from the settings alone, never from the cluster."""
    match config.section:
        case AblationSettings():
            return _items_units(num_items, num_votes=len(config.ablations()))
        case DoubleMaskingSettings():
            return _items_units(num_items, num_votes=len(config.masks().pairs()))
        case GaussianSettings() as section:
            return _draws_units(section, num_items)
    raise ValueError(f"no voter for {config.section.kind}")


def _items_units(num_items: int, *, num_votes: int) -> list[Unit]:
    step = max(1, min(ITEMS_PER_UNIT, VOTES_PER_UNIT // num_votes))
    spans = [range(i, min(i + step, num_items)) for i in range(0, num_items, step)]
    return [
        Unit(f"items-{s.start:08d}", f"test items {s.start}..{s.stop - 1}", tuple(s)) for s in spans
    ]


def _draws_units(section: GaussianSettings, num_items: int) -> list[Unit]:
    """All draws of all items; none where each result decides what is drawn next."""
    if section.method == "sequential":
        return []
    starts = range(0, section.num_estimate, section.block_size)
    return [draw_unit(section, item, start) for item in range(num_items) for start in starts]


def draw_unit(section: GaussianSettings, item: int, start: int) -> Unit:
    """One block of estimating draws; the few selecting ones ride along with the first."""
    blocks = [Block(item, "estimate", start, block_stop(section, start))]
    if start == 0:
        blocks.insert(0, Block(item, "select", 0, section.num_select))
    return Unit(f"item-{item:08d}-draw-{start:09d}", f"test item {item}", tuple(blocks))


def block_stop(section: GaussianSettings, start: int) -> int:
    """Where the block of draws from `start` on ends.

    Sequential blocks grow from one micro-batch to `block_size`: easy items stop within the first.
    """
    size = section.block_size
    if section.method == "sequential":
        size = min(size, max(section.micro_batch, start))
    return min(start + size, section.num_estimate)


def _row(item: ImageSplit, stream: str, start: int, predictions: Array) -> dict[str, object]:
    return {
        "item_id": item.item_ids[0],
        "label": int(item.labels[0]),
        "image_sha256": image_digest(item.images[0]),
        "stream": stream,
        "start": start,
        "stop": start + len(predictions),
        "predictions": predictions,
    }
