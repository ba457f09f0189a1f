"""Prepared datasets as tensors: a split whole in memory, or read shard by shard as it is used."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from components.core.errors import CasemateError
from components.core.types import Images
from components.data.stream import Rows, ShardReader, StoredShard, read_page, stored_shards

MEMORY_MB = 4096  # splits up to this size are held in memory
CACHE_SHARDS = 8  # of a split that is not; items are shuffled among so many shards at a time


class Split(Protocol):
    """Items of one split, wherever they are; the stored order is a seeded shuffle."""

    def __len__(self) -> int: ...

    def rows(self, index: Tensor) -> "ImageSplit":
        """The items at these positions, in this order."""
        ...

    def span(self, start: int, stop: int) -> "ImageSplit":
        """Items `start..stop-1`."""
        ...

    def take(self, num_items: int) -> "ImageSplit":
        """At most the first `num_items`: a fair sample, because the stored order is shuffled."""
        ...

    def order(self, generator: torch.Generator) -> Tensor:
        """All positions once, in the random order that suits where the items are."""
        ...


@dataclass(frozen=True, eq=False)
class ImageSplit:
    """Items of one split in memory, in stored order (a seeded shuffle)."""

    item_ids: tuple[str, ...]
    images: Tensor  # (N, C, H, W) uint8
    labels: Tensor  # (N,) int64

    def __post_init__(self) -> None:
        if not len(self.item_ids) == len(self.images) == len(self.labels):
            raise ValueError("item_ids, images and labels differ in length")

    def __len__(self) -> int:
        return len(self.item_ids)

    def pixels(self, index: slice | Tensor | None = None) -> Images:
        """The chosen images as float32 in [0, 1]."""
        chosen = self.images if index is None else self.images[index]
        return chosen.to(torch.float32) / 255

    def rows(self, index: Tensor) -> "ImageSplit":
        """The items at these positions, in this order."""
        item_ids = tuple(self.item_ids[i] for i in index.tolist())
        return ImageSplit(item_ids, self.images[index], self.labels[index])

    def take(self, num_items: int) -> "ImageSplit":
        """At most the first `num_items`: a fair sample, because the stored order is shuffled."""
        if num_items < 0:
            raise ValueError(f"cannot take {num_items} items")
        return self.span(0, num_items)

    def span(self, start: int, stop: int) -> "ImageSplit":
        """Items `start..stop-1`."""
        return ImageSplit(
            self.item_ids[start:stop], self.images[start:stop], self.labels[start:stop]
        )

    def order(self, generator: torch.Generator) -> Tensor:
        """All positions once, every order equally likely."""
        return torch.randperm(len(self), generator=generator)


@dataclass(frozen=True, eq=False)
class LazySplit:
    """Items of one split on disk, of which a few shards are in memory at any time."""

    reader: ShardReader

    def __len__(self) -> int:
        return len(self.reader)

    def rows(self, index: Tensor) -> ImageSplit:
        """The items at these positions, in this order."""
        return _in_memory(self.reader.rows(index.numpy()))

    def take(self, num_items: int) -> ImageSplit:
        """At most the first `num_items`: a fair sample, because the stored order is shuffled."""
        if num_items < 0:
            raise ValueError(f"cannot take {num_items} items")
        return self.span(0, num_items)

    def span(self, start: int, stop: int) -> ImageSplit:
        """Items `start..stop-1`."""
        return _in_memory(self.reader.rows(np.arange(*slice(start, stop).indices(len(self)))))

    def order(self, generator: torch.Generator) -> Tensor:
        """All positions once, in an order that never needs more shards than the cache holds."""
        sizes = [shard.num_items for shard in self.reader.shards]
        return windowed_order(sizes, window=self.reader.cache_shards, generator=generator)


def windowed_order(shard_sizes: list[int], *, window: int, generator: torch.Generator) -> Tensor:
    """A permutation with locality: shards in random order, items shuffled among `window` of them.

    The stored order is shuffled already, so a window is a fair sample of the split. With a window
    of all shards this is a plain random permutation.
    """
    if window < 1:
        raise ValueError(f"window must be >= 1, got {window}")
    shards = torch.split(torch.arange(sum(shard_sizes)), shard_sizes)
    queue = torch.randperm(len(shards), generator=generator).tolist()
    order = []
    for first in range(0, len(queue), window):
        near = torch.cat([shards[number] for number in queue[first : first + window]])
        order.append(near[torch.randperm(len(near), generator=generator)])
    return torch.cat([*order, torch.arange(0)])


@dataclass(frozen=True, eq=False)
class PreparedDataset:
    """A finished prepare folder; `digest` names its content on every machine."""

    folder: Path
    classes: tuple[str, ...]
    channels: int
    height: int  # of what models see; training images may be stored larger: see `sides`
    width: int
    digest: str
    splits: dict[str, int]  # items per split
    sides: dict[str, tuple[int, int]]  # stored height and width per split
    _shards: dict[str, tuple[StoredShard, ...]]

    @staticmethod
    def open(folder: Path) -> "PreparedDataset":
        """Reads dataset.json only; shards are checked when they are loaded."""
        page = read_page(folder / "dataset.json")
        splits = page["splits"]
        height, width = page["height"], page["width"]
        return PreparedDataset(
            folder=folder,
            classes=tuple(page["classes"]),
            channels=page["channels"],
            height=height,
            width=width,
            digest=page["digest"],
            splits={name: split["num_items"] for name, split in splits.items()},
            sides={  # older pages name one size for all splits
                name: (split.get("height", height), split.get("width", width))
                for name, split in splits.items()
            },
            _shards={name: stored_shards(page, name) for name in splits},
        )

    def load(self, split: str, *, limit: int | None = None) -> ImageSplit:
        """The first `limit` items (or all) in memory; only the shards that hold them are read."""
        if limit is not None and limit < 0:
            raise ValueError(f"limit must be >= 0, got {limit}")
        lazy = self.lazy(split, cache_shards=1)
        return lazy.take(len(lazy) if limit is None else limit)

    def lazy(self, split: str, *, cache_shards: int = CACHE_SHARDS) -> LazySplit:
        """The split on disk, with at most `cache_shards` shards in memory, still encoded."""
        if split not in self.splits:
            raise CasemateError("split", split, f"is not one of {', '.join(self.splits)}")
        shape = (self.channels, *self.sides[split])
        shards = self._shards[split]
        return LazySplit(
            ShardReader(self.folder, shards, image_shape=shape, cache_shards=cache_shards)
        )

    def open_split(
        self, split: str, *, memory_mb: int = MEMORY_MB, cache_shards: int = CACHE_SHARDS
    ) -> Split:
        """In memory where its pixels fit into `memory_mb`, else lazy.

        A lazy split is trained on in another order, so the size of the data and these settings
        decide, never the machine.
        """
        lazy = self.lazy(split, cache_shards=cache_shards)
        num_bytes = len(lazy) * int(np.prod(lazy.reader.image_shape))
        return self.load(split) if num_bytes <= memory_mb * 2**20 else lazy


def _in_memory(rows: Rows) -> ImageSplit:
    return ImageSplit(
        tuple(rows.item_ids), torch.from_numpy(rows.images), torch.from_numpy(rows.labels)
    )
