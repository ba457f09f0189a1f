"""Small datasets in the layouts that users have, made of waves."""

import gzip
import json
import pickle
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from components.data.encodings import encode_png


def pixels(label: int, number: int, height: int = 32, width: int = 32, channels: int = 3):
    """An image of a class: waves whose length depends on the label."""
    across = np.sin(np.arange(width) * (label + 1) / 3 + number)[None, :, None]
    down = np.cos(np.arange(height) * (label + 1) / 5 + number)[:, None, None]
    depth = np.linspace(0.5, 1, channels)[None, None, :]
    return np.uint8(127 + 60 * (across + down) * depth)


def save(path: Path, image) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image[..., 0] if image.shape[2] == 1 else image).save(path)
    return path


def class_folders(
    root: Path,
    counts: Mapping[str, int],
    *,
    height: int = 32,
    width: int = 32,
    channels: int = 3,
    split: str = "",
) -> Path:
    """root/[split/]class/number.png"""
    for label, (name, count) in enumerate(counts.items()):
        for number in range(count):
            image = pixels(label, number, height, width, channels)
            save(root / split / name / f"{number:03d}.png", image)
    return root


def arrays(num_items: int, num_classes: int = 4, side: int = 16, channels: int = 3):
    """(images, labels) of a whole split."""
    labels = np.arange(num_items) % num_classes
    images = [pixels(int(k), n, side, side, channels) for n, k in enumerate(labels)]
    return np.stack(images), labels


def flat(root: Path) -> Path:
    return class_folders(root, {"cat": 24, "dog": 24, "owl": 24, "yak": 24})


def with_splits(root: Path) -> Path:
    for split, count in (("train", 30), ("valid", 6), ("test", 6)):
        class_folders(root, {"cat": count, "dog": count}, split=split)
    return root


def npz(root: Path) -> Path:
    root.mkdir()
    (images, labels), (test, answers) = arrays(80), arrays(20)
    path = root / "mine.npz"
    np.savez(path, x_train=images, y_train=labels, x_test=test, y_test=answers)
    return path


def parquet(root: Path) -> Path:
    """Columns as several sets of the Hugging Face hub have them."""
    root.mkdir()
    for split, count in (("train", 80), ("test", 20)):
        images, labels = arrays(count, channels=1)
        column = [{"bytes": encode_png(image), "path": None} for image in images]
        table = pa.table({"img": column, "fine_label": labels, "coarse_label": labels // 2})
        pq.write_table(table, root / f"{split}-00000-of-00001.parquet")
    return root


def cifar10(root: Path) -> Path:
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    names = [
        "airplane",
        "automobile",
        "bird",
        "cat",
        "deer",
        "dog",
        "frog",
        "horse",
        "ship",
        "truck",
    ]
    batches = {f"data_batch_{i}": 20 for i in range(1, 6)} | {"test_batch": 20}
    for file, count in batches.items():
        images, labels = arrays(count, 10, side=32)
        rows = images.transpose(0, 3, 1, 2).reshape(count, -1)
        (folder / file).write_bytes(pickle.dumps({"data": rows, "labels": labels.tolist()}, 2))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": names}, 2))
    return root


def idx(root: Path) -> Path:
    root.mkdir()
    for prefix, count in (("train", 80), ("t10k", 20)):
        images, labels = arrays(count, 10, side=28, channels=1)
        head = struct.pack(">4B3I", 0, 0, 8, 3, count, 28, 28)
        packed = gzip.compress(head + images.tobytes())
        (root / f"{prefix}-images-idx3-ubyte.gz").write_bytes(packed)
        head = struct.pack(">4BI", 0, 0, 8, 1, count)
        (root / f"{prefix}-labels-idx1-ubyte").write_bytes(head + labels.astype("u1").tobytes())
    return root


def mixed_sizes(root: Path) -> Path:
    class_folders(root, {"cat": 20, "dog": 20}, height=50, width=70)
    for number in range(20, 40):
        save(root / "dog" / f"{number:03d}.png", pixels(1, number, 40 + number, 44))
    return root


def photographs(root: Path) -> Path:
    return class_folders(root, {"cat": 12, "dog": 12, "owl": 12, "yak": 12}, height=180, width=240)


LAYOUTS: Mapping[str, Callable[[Path], Path]] = {
    maker.__name__: maker
    for maker in (flat, with_splits, npz, parquet, cifar10, idx, mixed_sizes, photographs)
}


def prepared(folder: Path, *, side: int = 16) -> Path:
    """A prepared dataset, as `casemate prepare` leaves it: a step also keeps files by content."""
    folder.mkdir(parents=True)
    splits = {}
    for split, count in (("train", 40), ("val", 8), ("test", 8)):
        images, labels = arrays(count, side=side)
        rows = {
            "item_id": [f"{split}-{n}" for n in range(count)],
            "image": [encode_png(image) for image in images],
            "height": [side] * count,
            "width": [side] * count,
            "label": labels,
        }
        pq.write_table(pa.table(rows), folder / f"{split}-00000.parquet")
        kept = folder / "files" / f"{len(splits):020x}"
        kept.mkdir(parents=True)
        pq.write_table(pa.table(rows), kept / f"{split}-00000.parquet")
        splits[split] = {"num_items": count, "shards": []}
    described = {"classes": ["a", "b", "c", "d"], "splits": splits}
    (folder / "dataset.json").write_text(json.dumps(described))
    return folder
