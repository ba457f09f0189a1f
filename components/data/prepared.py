"""Reading the prepared format: dataset.json and checksummed Parquet shards -> uint8 tensors."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from components.core.errors import CasemateError
from components.core.types import Images
from components.data.shards import FORMAT, decode_image


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


@dataclass(frozen=True, slots=True)
class _Shard:
    file: str
    sha256: str
    num_items: int


@dataclass(frozen=True, eq=False)
class PreparedDataset:
    """A finished prepare folder; `digest` names its content on every machine."""

    folder: Path
    classes: tuple[str, ...]
    channels: int
    height: int
    width: int
    digest: str
    splits: dict[str, int]  # items per split
    _shards: dict[str, tuple[_Shard, ...]]

    @staticmethod
    def open(folder: Path) -> "PreparedDataset":
        """Reads dataset.json only; shards are checked when they are loaded."""
        page = _read_page(folder / "dataset.json")
        splits = page["splits"]
        return PreparedDataset(
            folder=folder,
            classes=tuple(page["classes"]),
            channels=page["channels"],
            height=page["height"],
            width=page["width"],
            digest=page["digest"],
            splits={name: split["num_items"] for name, split in splits.items()},
            _shards={
                name: tuple(_Shard(**shard) for shard in split["shards"])
                for name, split in splits.items()
            },
        )

    def load(self, split: str, *, limit: int | None = None) -> ImageSplit:
        """The first `limit` items (or all), from shards whose checksums agree with dataset.json."""
        if split not in self.splits:
            raise CasemateError("split", split, f"is not one of {', '.join(self.splits)}")
        if limit is not None and limit < 0:
            raise ValueError(f"limit must be >= 0, got {limit}")
        available = self.splits[split]
        num_items = available if limit is None else min(limit, available)
        images = np.empty((num_items, self.channels, self.height, self.width), dtype=np.uint8)
        item_ids: list[str] = []
        labels: list[int] = []
        for shard in self._shards[split]:
            if len(item_ids) == num_items:
                break
            table = _read_shard(self.folder, shard).slice(0, num_items - len(item_ids))
            for row, image in enumerate(table.column("image"), start=len(item_ids)):
                images[row] = decode_image(image.as_py()).transpose(2, 0, 1)
            item_ids += table.column("item_id").to_pylist()
            labels += table.column("label").to_pylist()
        if len(item_ids) != num_items:
            raise CasemateError(
                "dataset", self.folder, f"lacks items of split {split}; prepare again"
            )
        return ImageSplit(
            tuple(item_ids), torch.from_numpy(images), torch.tensor(labels, dtype=torch.int64)
        )


def _read_page(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CasemateError("dataset", path, "is missing; run the prepare stage to its end")
    try:
        page: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CasemateError("dataset", path, f"is not JSON ({error}); prepare again") from error
    found = page.get("format") if isinstance(page, dict) else None
    if found != FORMAT:
        remedy = f"has the format {found}, this version reads {FORMAT}; prepare again"
        raise CasemateError("dataset", path, remedy)
    return page


def _read_shard(folder: Path, shard: _Shard) -> pa.Table:
    path = folder / shard.file
    if not path.is_file():
        raise CasemateError("dataset", path, "is missing; prepare again")
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != shard.sha256:
        remedy = (
            f"is damaged or foreign: sha256 {found[:12]}, not {shard.sha256[:12]}; prepare again"
        )
        raise CasemateError("dataset", path, remedy)
    return pq.read_table(pa.BufferReader(content))
