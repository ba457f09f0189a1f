"""Workers that produce votes: what runs on an actor, in a test and in `verify --resample` alike."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from components.certify.noise import predict_block
from components.certify.votes import SCHEMA, image_digest
from components.data.prepared import ImageSplit, PreparedDataset, Split
from components.models.checkpoint import load_model
from components.models.voting import column_predictions
from pipelines.runtime.shards import Unit, WorkFn
from pipelines.sections import ColumnsCertify, GaussianCertify

ITEMS_PER_UNIT = 20  # of column votes: about a second of work for a small model


@dataclass(frozen=True, slots=True)
class VoteConfig:
    """Places and settings; `band` is resolved."""

    dataset: Path
    model: Path
    section: ColumnsCertify | GaussianCertify
    band: int | None
    seed: int
    device: str


@dataclass(frozen=True, slots=True)
class Block:
    """Draws `start..stop-1` of one stream of one test item."""

    item: int
    stream: str
    start: int
    stop: int


class ColumnsVoter:
    """All column ablations of some items."""

    def __init__(self, config: VoteConfig) -> None:
        assert config.band is not None
        self.config, self.band = config, config.band
        self.items = load_items(config)
        self.model = load_model(config.model, device=config.device)

    def __call__(self, indices: Iterable[int]) -> pa.Table:
        section = self.config.section
        assert isinstance(section, ColumnsCertify)
        rows = []
        for index in indices:
            item = self.items.span(index, index + 1)
            votes = column_predictions(
                self.model,
                item.pixels(),
                band=self.band,
                stride=section.stride,
                micro_batch=section.micro_batch,
            )
            rows.append(_row(item, "columns", 0, votes[0].numpy().astype(np.uint16)))
        return pa.Table.from_pylist(rows, schema=SCHEMA)


class GaussianVoter:
    """Blocks of noisy draws of some items."""

    def __init__(self, config: VoteConfig) -> None:
        self.config = config
        self.items = load_items(config)
        self.model = load_model(config.model, device=config.device)

    def __call__(self, blocks: Iterable[Block]) -> pa.Table:
        section = self.config.section
        assert isinstance(section, GaussianCertify)
        rows = []
        for b in blocks:
            item = self.items.span(b.item, b.item + 1)
            predictions = predict_block(
                self.model,
                item.pixels()[0],
                sigma=section.sigma,
                run_seed=self.config.seed,
                stream=b.stream,
                item_id=item.item_ids[0],
                start=b.start,
                stop=b.stop,
                micro_batch=section.micro_batch,
                device=self.config.device,
            )
            rows.append(_row(item, b.stream, b.start, predictions))
        return pa.Table.from_pylist(rows, schema=SCHEMA)


def make_voter(config: VoteConfig) -> WorkFn:
    """The voter of a certify section."""
    if isinstance(config.section, ColumnsCertify):
        return ColumnsVoter(config)
    return GaussianVoter(config)


def load_items(config: VoteConfig) -> Split:
    """The test items: in memory where they fit, else read shard by shard."""
    return PreparedDataset.open(config.dataset).open_split("test")


def plan_votes(section: ColumnsCertify | GaussianCertify, *, num_items: int) -> list[Unit]:
    """The units of work: they follow from the settings alone, never from the cluster."""
    if isinstance(section, ColumnsCertify):
        spans = [
            range(i, min(i + ITEMS_PER_UNIT, num_items))
            for i in range(0, num_items, ITEMS_PER_UNIT)
        ]
        return [
            Unit(f"items-{s.start:08d}", f"test items {s.start}..{s.stop - 1}", tuple(s))
            for s in spans
        ]
    units = []
    for item in range(num_items):
        for start in range(0, section.num_estimate, section.block_size):
            stop = min(start + section.block_size, section.num_estimate)
            blocks = [Block(item, "estimate", start, stop)]
            if start == 0:  # the few selection draws ride along with the first block
                blocks.insert(0, Block(item, "select", 0, section.num_select))
            units.append(
                Unit(f"item-{item:08d}-draw-{start:09d}", f"test item {item}", tuple(blocks))
            )
    return units


def _row(item: ImageSplit, stream: str, start: int, predictions: np.ndarray) -> dict[str, object]:
    return {
        "item_id": item.item_ids[0],
        "label": int(item.labels[0]),
        "image_sha256": image_digest(item.images[0]),
        "stream": stream,
        "start": start,
        "stop": start + len(predictions),
        "predictions": predictions,
    }
