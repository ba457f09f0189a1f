"""A toy problem that a tiny transformer learns in a few steps: is the middle bright or dark?"""

import pytest
import torch

from components.data.prepared import ImageSplit
from components.data.settings import AugmentSettings
from components.models.spec import ModelSpec
from components.train.objectives.base import Batch
from components.train.settings import TrainSettings

SIDE = 8
SETTINGS = TrainSettings(
    batch_size=8,
    learning_rate=5e-3,
    augment=AugmentSettings(crop="pad", pad=1, flip=True),
    val_items=6,
    val_eps=0.1,
    val_steps=2,
    stop_on_leak=False,
)


def make_split(num_items: int, *, seed: int, prefix: str) -> ImageSplit:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(num_items) % 2
    images = torch.randint(0, 60, (num_items, 1, SIDE, SIDE), generator=generator)
    images += 180 * labels[:, None, None, None]
    ids = tuple(f"{prefix}-{i}" for i in range(num_items))
    return ImageSplit(ids, images.to(torch.uint8), labels)


@pytest.fixture
def toy_spec() -> ModelSpec:
    options = {"patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2}
    return ModelSpec("tiny_vit", 2, 1, SIDE, (0.5,), (0.5,), token_policy="drop", options=options)


@pytest.fixture
def train_split() -> ImageSplit:
    return make_split(22, seed=0, prefix="train")


@pytest.fixture
def val_split() -> ImageSplit:
    return make_split(10, seed=1, prefix="val")


class Toy:
    """A prepared dataset of these splits, as far as training asks for one."""

    classes = ("dark", "bright")
    channels, height, width = 1, SIDE, SIDE

    def __init__(self, train: ImageSplit, val: ImageSplit) -> None:
        self.splits = {"train": train, "val": val}

    def open_split(self, split: str, *, memory_mb: int, limit: int | None = None) -> ImageSplit:
        assert limit is None
        return self.splits[split]


@pytest.fixture
def toy(train_split, val_split) -> Toy:
    return Toy(train_split, val_split)


@pytest.fixture
def new_batch(train_split):
    """A part of one global batch: the items at `index`, at some epoch and step."""

    def make(index=slice(None), *, seed: int = 7, epoch: int = 0, step: int = 0) -> Batch:
        rows = list(range(len(train_split)))[index]
        ids = tuple(train_split.item_ids[row] for row in rows)
        pixels, labels = train_split.pixels(torch.tensor(rows)), train_split.labels[rows]
        return Batch(pixels, labels, ids, seed, epoch, step)

    return make
