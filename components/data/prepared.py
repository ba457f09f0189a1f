"""Prepared datasets as tensors: a split in memory, or read shard by shard when used."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from components.core.errors import CasemateError, first_line
from components.core.folders import Folder
from components.core.types import Images
from components.data.encodings import Encoding, decode_jpegs
from components.data.read_ahead import PlannedReader
from components.data.stream import (
    Rows,
    ShardReader,
    StoredShard,
    read_document,
    read_listing,
    stored_encoding,
    stored_shards,
)

MEMORY_MB = 4096  # splits up to this size are held in memory
MAX_SIDE = 2**16  # pixels of an image
CACHE_SHARDS = 8  # cached shards of a larger split; items are shuffled among this many at a time


class BalancedOrder(NamedTuple):
    """A permutation, and the slot of each position: the place of its shard in its window."""

    order: Tensor
    slots: Tensor  # by position, not by place in the order


class Split(Protocol):
    """Items of one split, in memory or on disk; the stored order is a seeded shuffle."""

    def __len__(self) -> int: ...

    def rows(self, index: Tensor) -> "ImageSplit":
        """The items at these positions, in this order."""
        ...

    def span(self, start: int, stop: int) -> "ImageSplit":
        """Items `start..stop-1`."""
        ...

    def take(self, num_items: int) -> "ImageSplit":
        """At most the first `num_items`: a random sample, as the stored order is shuffled."""
        ...

    def order(self, generator: torch.Generator) -> Tensor:
        """All positions once, in a random order that fits the storage."""
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
        """At most the first `num_items`: a random sample, as the stored order is shuffled."""
        if num_items < 0:
            raise ValueError(f"cannot take {num_items} items")
        return self.span(0, num_items)

    def span(self, start: int, stop: int) -> "ImageSplit":
        """Items `start..stop-1`."""
        return ImageSplit(
            self.item_ids[start:stop], self.images[start:stop], self.labels[start:stop]
        )

    def order(self, generator: torch.Generator) -> Tensor:
        """A uniformly random permutation of the positions."""
        return torch.randperm(len(self), generator=generator)


@dataclass(frozen=True, eq=False)
class LazySplit:
    """Items of one split on disk, with a few shards in memory at a time."""

    reader: ShardReader
    limit: int | None = None  # only the first items; None: all
    decoded_on: torch.device | None = None  # where `rows` decodes JPEG; None: on the host

    def __len__(self) -> int:
        return min(len(self.reader), len(self.reader) if self.limit is None else self.limit)

    def rows(self, index: Tensor) -> ImageSplit:
        """The items at these positions, in this order."""
        if self.decoded_on is None:
            return _in_memory(self.reader.rows(index.numpy()))
        found = self.reader.encoded(index.numpy())
        images = self._on_device(found.contents, self.decoded_on)
        return ImageSplit(tuple(found.item_ids), images, torch.from_numpy(found.labels))

    def _on_device(self, contents: list[bytes], device: torch.device) -> Tensor:
        """(N, C, H, W) uint8 of JPEG files, decoded there."""
        shape = self.reader.image_shape
        if not contents:
            return torch.empty(0, *shape, dtype=torch.uint8, device=device)
        try:
            images = decode_jpegs(contents, channels=shape[0], device=device)
        except RuntimeError as error:
            remedy = f"does not work on {device} ({first_line(error)}); write host"
            raise CasemateError("train.decode", "device", remedy) from error
        if tuple(images.shape[1:]) != shape:
            found, stored = ("x".join(map(str, sides)) for sides in (images.shape[1:], shape))
            remedy = f"is {found}, not the {stored} of its dataset; prepare again"
            raise CasemateError("dataset", self.reader.folder, remedy)
        return images

    def take(self, num_items: int) -> ImageSplit:
        """At most the first `num_items`: a random sample, as the stored order is shuffled."""
        if num_items < 0:
            raise ValueError(f"cannot take {num_items} items")
        return self.span(0, num_items)

    def span(self, start: int, stop: int) -> ImageSplit:
        """Items `start..stop-1`."""
        return _in_memory(self.reader.rows(np.arange(*slice(start, stop).indices(len(self)))))

    def order(self, generator: torch.Generator) -> Tensor:
        """A permutation of the positions that never needs more shards than the cache holds."""
        sizes, window = self._sizes(), self.reader.cache_shards
        return windowed_order(sizes, window=window, generator=generator)

    def balanced_order(self, generator: torch.Generator) -> BalancedOrder:
        """A permutation whose parts hold equally many items of each shard of a window."""
        sizes, window = self._sizes(), self.reader.cache_shards
        return balanced_order(sizes, window=window, generator=generator)

    def planned(self, positions: Tensor) -> tuple["LazySplit", PlannedReader]:
        """The split for a pass over these positions, read ahead; close the reader after it."""
        reader = PlannedReader(self.reader, positions.numpy())
        return replace(self, reader=reader), reader

    def _sizes(self) -> list[int]:
        """Items of each shard that the split uses."""
        sizes, left = [], len(self)
        for shard in self.reader.shards:
            sizes.append(min(shard.num_items, left))
            left -= sizes[-1]
        return [size for size in sizes if size]


@dataclass(frozen=True, eq=False)
class KeptSplit:
    """Items of one split on disk; those that were asked for stay in memory, decoded."""

    lazy: LazySplit
    _kept: dict[int, ImageSplit] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.lazy)

    def rows(self, index: Tensor) -> ImageSplit:
        """The items at these positions, in this order."""
        places = index.tolist()
        missing = [place for place in dict.fromkeys(places) if place not in self._kept]
        if missing:
            read = self.lazy.rows(torch.tensor(missing))
            self._kept.update((place, read.span(i, i + 1)) for i, place in enumerate(missing))
        found = [self._kept[place] for place in places]
        if not found:
            return self.lazy.rows(index)
        return ImageSplit(
            tuple(item.item_ids[0] for item in found),
            torch.cat([item.images for item in found]),
            torch.cat([item.labels for item in found]),
        )

    def take(self, num_items: int) -> ImageSplit:
        """At most the first `num_items`: a random sample, as the stored order is shuffled."""
        if num_items < 0:
            raise ValueError(f"cannot take {num_items} items")
        return self.span(0, num_items)

    def span(self, start: int, stop: int) -> ImageSplit:
        """Items `start..stop-1`."""
        return self.rows(torch.arange(*slice(start, stop).indices(len(self))))

    def order(self, generator: torch.Generator) -> Tensor:
        """A permutation of the positions that never needs more shards than the cache holds."""
        return self.lazy.order(generator)


def windowed_order(shard_sizes: list[int], *, window: int, generator: torch.Generator) -> Tensor:
    """A permutation with locality: shards in random order, items shuffled within `window` shards.

    The stored order is shuffled already, so a window is a random sample of the split. With a window
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


def balanced_order(
    shard_sizes: list[int], *, window: int, generator: torch.Generator
) -> BalancedOrder:
    """Shards in random order, items shuffled within each; shards of a window take turns, by pairs.

    Any part of 2 k * `window` items holds 2 k of each shard, where shards have one size.
    """
    if window < 1:
        raise ValueError(f"window must be >= 1, got {window}")
    shards = torch.split(torch.arange(sum(shard_sizes)), shard_sizes)
    queue = torch.randperm(len(shards), generator=generator).tolist()
    slots = torch.zeros(sum(shard_sizes), dtype=torch.int64)
    order = []
    for first in range(0, len(queue), window):
        turns, near = [], []
        for slot, number in enumerate(queue[first : first + window]):
            shard = shards[number]
            slots[shard] = slot
            near.append(shard[torch.randperm(len(shard), generator=generator)])
            pairs = torch.div(torch.arange(len(shard)), 2, rounding_mode="floor").double()
            turns.append((pairs + 0.5) / (len(shard) / 2))  # a smaller shard: fewer, further apart
        places = torch.argsort(torch.cat(turns), stable=True)
        order.append(torch.cat(near)[places])
    return BalancedOrder(torch.cat([*order, torch.arange(0)]), slots)


@dataclass(frozen=True, eq=False)
class PreparedDataset:
    """A finished prepare folder; `digest` identifies its content on every machine."""

    folder: Folder
    classes: tuple[str, ...]
    channels: int
    height: int  # of model inputs; training images may be stored larger: see `sides`
    width: int
    digest: str
    splits: dict[str, int]  # items per split
    sides: dict[str, tuple[int, int]]  # stored height and width per split
    _shards: dict[str, tuple[StoredShard, ...]]
    _encodings: dict[str, Encoding]

    @staticmethod
    def open(folder: Folder) -> "PreparedDataset":
        """Read dataset.json only; shards are checked when they are loaded."""
        path = folder / "dataset.json"
        document = read_document(path)
        try:
            dataset = PreparedDataset._described(folder, document)
        except (KeyError, TypeError, AttributeError) as error:
            raise CasemateError(
                "dataset", path, f"cannot be used: {error}; prepare again"
            ) from error
        sides = [side for pair in dataset.sides.values() for side in pair]
        for side in (dataset.channels, dataset.height, dataset.width, *sides):
            if not (isinstance(side, int) and 1 <= side <= MAX_SIDE):
                raise CasemateError("dataset", path, f"has images of side {side}; prepare again")
        return dataset

    @staticmethod
    def _described(folder: Folder, document: Mapping[str, Any]) -> "PreparedDataset":
        splits = document["splits"]
        height, width = document["height"], document["width"]
        return PreparedDataset(
            folder=folder,
            classes=tuple(map(str, document["classes"])),
            channels=document["channels"],
            height=height,
            width=width,
            digest=str(document["digest"]),
            splits={name: int(split["num_items"]) for name, split in splits.items()},
            sides={  # older documents have one size for all splits
                name: (split.get("height", height), split.get("width", width))
                for name, split in splits.items()
            },
            _shards={name: stored_shards(document, name) for name in splits},
            _encodings={name: stored_encoding(document, name) for name in splits},
        )

    def load(self, split: str, *, limit: int | None = None) -> ImageSplit:
        """The first `limit` items (or all) in memory; only the shards that hold them are read."""
        if limit is not None and limit < 0:
            raise ValueError(f"limit must be >= 0, got {limit}")
        lazy = self.lazy(split, cache_shards=1)
        return lazy.take(len(lazy) if limit is None else limit)

    def listing(self, split: str) -> tuple[list[str], list[int]]:
        """Ids and labels of a split, in stored order; its images are not read."""
        return read_listing(self.folder, self.lazy(split).reader.shards)

    def lazy(self, split: str, *, cache_shards: int = CACHE_SHARDS) -> LazySplit:
        """The split on disk, with at most `cache_shards` shards in memory, still encoded."""
        if split not in self.splits:
            raise CasemateError("split", split, f"is not one of {', '.join(self.splits)}")
        shape = (self.channels, *self.sides[split])
        encoding = self._encodings[split]
        encoding.check_decoder(self.folder / "dataset.json")
        return LazySplit(
            ShardReader(
                self.folder,
                self._shards[split],
                image_shape=shape,
                cache_shards=cache_shards,
                encoding=encoding,
            )
        )

    def open_split(
        self, split: str, *, memory_mb: int = MEMORY_MB, limit: int | None = None
    ) -> Split:
        """The split, or its first `limit` items: in memory if they fit into `memory_mb`, else lazy.

        A lazy split has another training order, so the choice depends on data size and settings
        only, not on the machine.
        """
        lazy = replace(self.lazy(split), limit=limit)
        fits = _num_bytes(lazy) <= memory_mb * 2**20
        return self.load(split, limit=limit) if fits else lazy

    def on_demand(self, split: str) -> Split:
        """The split, of which only shards with requested items are read.

        These items stay in memory if the whole split would fit, as with `open_split`.
        """
        lazy = self.lazy(split)
        return KeptSplit(lazy) if _num_bytes(lazy) <= MEMORY_MB * 2**20 else lazy


def _num_bytes(lazy: LazySplit) -> int:
    """Of all images in memory."""
    return len(lazy) * int(np.prod(lazy.reader.image_shape))


def _in_memory(rows: Rows) -> ImageSplit:
    return ImageSplit(
        tuple(rows.item_ids), torch.from_numpy(rows.images), torch.from_numpy(rows.labels)
    )
