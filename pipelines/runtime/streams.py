"""Ray Data over prepared datasets: ordered, checksummed, a few megabytes in flight per worker.

Workers import this module: it stays free of torch, pydantic and mlflow.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from math import sqrt
from typing import Any

import numpy as np
import ray.data
from ray.exceptions import RayTaskError

from components.core.errors import CasemateError
from components.core.folders import Folder, absolute, folder_at
from components.data.encodings import Encoding
from components.data.stream import (
    ShardReader,
    StoredShard,
    read_document,
    stored_encoding,
    stored_shards,
)

BLOCK_BYTES = 8 * 2**20  # decoded pixels that travel together through the object store
Batch = dict[str, np.ndarray]


@contextmanager
def ordered_ray_data() -> Iterator[None]:
    """Ray Data in order and silent: no progress bars, no log lines; settings are restored after."""
    context = ray.data.DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_options.preserve_order = True
    context.target_max_block_size = BLOCK_BYTES
    context.raise_original_map_exception = True  # a user's mistake stays one line
    logger = logging.getLogger("ray.data")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with ray.data.DataContext.current(context):
            yield
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, CasemateError) else error from None
    finally:
        logger.setLevel(level)


def read_split(folder: Folder, split: str) -> ray.data.Dataset:
    """Rows {item_id, image (C, H, W) uint8, label} of a split in stored order; one task per shard.

    Not Ray's own Parquet reader: a shard's bytes are compared with the checksum in dataset.json
    before it is decoded. Use inside `ordered_ray_data`.
    """
    document = read_document(folder / "dataset.json")
    shards = stored_shards(document, split)
    if not shards:
        raise CasemateError("split", split, f"of {folder} holds no item")
    sizes = document["splits"][split]
    height, width = (sizes.get(side, document[side]) for side in ("height", "width"))
    rows = ray.data.from_items(
        [shard._asdict() for shard in shards], override_num_blocks=len(shards)
    )
    return rows.map_batches(
        _decoded,
        batch_size=1,
        fn_kwargs={
            "folder": folder_at(absolute(folder)),
            "shape": (document["channels"], height, width),
            "encoding": stored_encoding(document, split),
        },
    )


def dataset_statistics(folder: Folder, split: str) -> dict[str, Any]:
    """Items, items per class, and each channel's mean and standard deviation on the [0, 1] scale.

    Workers count pixel values; the counts are added as integers and divided once, so the result
    is exact and the same for any number of workers.
    """
    classes = read_document(folder / "dataset.json")["classes"]
    with ordered_ray_data():
        counted = read_split(folder, split).map_batches(
            _counted, batch_size=None, fn_kwargs={"num_classes": len(classes)}
        )
        rows = list(counted.iter_rows())
    pixels = sum(row["pixels"].astype(object) for row in rows)  # Python integers: no overflow
    items = sum(row["items"] for row in rows).tolist()
    moments = [_moments(counts.tolist()) for counts in pixels]
    return {
        "num_items": sum(items),
        "class_counts": dict(zip(classes, items, strict=True)),
        "channel_mean": [mean for mean, _ in moments],
        "channel_std": [std for _, std in moments],
    }


def _decoded(
    rows: Batch, *, folder: Folder, shape: tuple[int, int, int], encoding: Encoding
) -> Iterator[Batch]:
    """Worker: one shard in, pieces of a few megabytes out."""
    step = max(1, BLOCK_BYTES // int(np.prod(shape)))
    for file, sha256, num_items in zip(
        rows["file"], rows["sha256"], rows["num_items"], strict=True
    ):
        shard = StoredShard(str(file), str(sha256), int(num_items))
        reader = ShardReader(folder, [shard], image_shape=shape, cache_shards=1, encoding=encoding)
        for start in range(0, len(reader), step):
            part = reader.rows(np.arange(start, min(start + step, len(reader))))
            yield {"item_id": np.array(part.item_ids), "image": part.images, "label": part.labels}


def _counted(rows: Batch, *, num_classes: int) -> Batch:
    """Worker: how often each class, and each value 0..255 in each channel, occurs."""
    channels = rows["image"].swapaxes(0, 1)
    values = np.stack([np.bincount(channel.reshape(-1), minlength=256) for channel in channels])
    items = np.bincount(rows["label"], minlength=num_classes)
    return {"pixels": values[None], "items": items[None]}


def _moments(counts: list[int]) -> tuple[float, float]:
    """Mean and standard deviation (over all pixels) of values 0..255, scaled to [0, 1]."""
    total = sum(counts)
    mean = Fraction(sum(value * n for value, n in enumerate(counts)), total)
    square = Fraction(sum(value * value * n for value, n in enumerate(counts)), total)
    return float(mean / 255), sqrt(square - mean * mean) / 255
