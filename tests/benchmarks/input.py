"""`make bench`: whether training waits for its data.

The demo's network trains plainly, its fastest objective, on the demo's digits; the share of the
epoch that it stood still for a batch is compared with the limit. Then batches are only built, not
used: images per second for the demo's setting and for the heavy augmentation of large images.
"""

import json
import os
import statistics
import sys
import time

import torch

from components.data.fitting import Fitting
from components.data.prepared import ImageSplit
from components.data.settings import AugmentSettings
from components.data.sources import open_source
from components.models.spec import ModelSpec
from components.train.epoch import EpochPlan, make_batch, train_epoch
from components.train.feed import Feed, Feeding, TrainingSet, Worker
from components.train.objectives.settings import StandardSettings
from components.train.objectives.standard import Standard
from components.train.session import initial_model
from components.train.settings import TrainSettings
from pipelines.recipe import load as recipes
from tests.benchmarks.table import promise

LIMIT = 0.05
ROUNDS = 3
HEAVY = AugmentSettings(
    crop="resized", flip=True, rand_augment="rand-m9-mstd0.5-inc1", erase_prob=0.25,
    mixup=0.8, cutmix=1.0,
)  # fmt: skip
STANDARD = Standard(StandardSettings(), label_smoothing=0.0)


def demo_digits(num_items: int) -> TrainingSet:
    """Real digits at the demo's size."""
    source, fitting = open_source("mnist5k", path=None), Fitting(32, "pad")
    entries = source.entries()[:: 5000 // num_items][:num_items]
    pixels = [fitting.apply(source.decode(e), item_id=e.item_id) for e in entries]
    images = torch.stack([torch.from_numpy(p.transpose(2, 0, 1)) for p in pixels])
    labels = torch.tensor([entry.label for entry in entries])
    return TrainingSet(ImageSplit(tuple(e.item_id for e in entries), images, labels))


def noise_images(num_items: int, side: int) -> TrainingSet:
    images = torch.randint(0, 256, (num_items, 3, side, side), dtype=torch.uint8)
    ids = tuple(f"noise-{index}" for index in range(num_items))
    return TrainingSet(ImageSplit(ids, images, torch.arange(num_items) % 10))


def wait_shares(data: TrainingSet, plan: EpochPlan) -> list[float]:
    """Share of each epoch that training spent waiting for a batch."""
    options = recipes.load("demo").model.options
    spec = ModelSpec("tiny_vit", 10, 1, 32, (0.5,), (0.5,), options=options)
    model = initial_model(spec, seed=0)
    updater = plan.updater(model)
    shares = []
    for epoch in range(ROUNDS + 1):
        part = train_epoch(
            model, model, data, STANDARD, updater, plan=plan, epoch=epoch, worker=Worker(),
        )  # fmt: skip
        shares.append(part["wait_seconds"] * part["images_per_second"] / part["count"])
    return shares[1:]  # the first one warms up


def build_rate(data: TrainingSet, plan: EpochPlan, feeding: Feeding) -> float:
    """Images per second when nothing is done with them."""

    def build(numbered):
        step, share = numbered
        return make_batch(
            data, share, plan=plan, num_classes=10, epoch=0, step=step,
            device=torch.device("cpu"),
        )  # fmt: skip

    began, count = time.perf_counter(), 0
    numbered = enumerate(plan.batches(data).shares(0, Worker()))
    with Feed(build, numbered, feeding=feeding) as feed:
        for batch in feed:
            count += len(batch.images)
    return count / (time.perf_counter() - began)


def main() -> int:
    torch.set_num_threads(1)
    common = {"seed": 0, "epochs": ROUNDS + 1}
    demo = EpochPlan(TrainSettings(batch_size=64), **common, image_size=32)
    moved = TrainSettings(batch_size=64, augment=AugmentSettings(crop="pad", pad=4, flip=True))
    basic = EpochPlan(moved, **common, image_size=32)
    heavy = EpochPlan(TrainSettings(batch_size=32, augment=HEAVY), **common, image_size=224)
    digits, noise = demo_digits(2500), noise_images(128, 256)
    shares = wait_shares(digits, demo)
    median = statistics.median(shares)
    print(json.dumps({
        "benchmark": "training input", "wait_shares": [round(share, 4) for share in shares],
        "median_wait_share": round(median, 4), "limit": LIMIT,
        "images_per_second": {
            "demo": round(build_rate(digits, demo, Feeding())),
            "pad, crop, flip at 32": round(build_rate(digits, basic, Feeding())),
            "heavy at 224, 1 thread": round(build_rate(noise, heavy, Feeding()), 1),
            "heavy at 224, 2 threads": round(
                build_rate(noise, heavy, Feeding(num_threads=2, num_ahead=4)), 1
            ),
        },
        "load": round(os.getloadavg()[0], 1),
    }))  # fmt: skip
    return int(not promise(
        "share of an epoch that waits for data, demo", ratio=median, at_most=LIMIT,
        ours=f"{median:.2%}",
    ))  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
