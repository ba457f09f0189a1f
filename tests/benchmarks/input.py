"""`make bench`: whether training waits for its data, and how fast a feed thread is.

The demo's network trains plainly, its fastest objective, on the demo's digits; the share of the
epoch that it stood still for a batch is compared with the limit. Then photographs at 256 pixels are
fed from shards: batches of one thread, by processor time, beside the same work as it was done
before; reads of shards by up to 16 threads; the wait of a model that takes 1.5 ms an image. All in
the environment that workers have.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2.functional import resized_crop

from components.data import stream
from components.data.augment.draws import Draws
from components.data.augment.framing import crop_boxes
from components.data.augment.rand_augment import draw_operations, perform, policy
from components.data.encodings import PNG, Encoding
from components.data.fitting import Fitting
from components.data.prepared import ImageSplit, PreparedDataset
from components.data.settings import AugmentSettings, DataSettings
from components.data.shards import describe_dataset, open_job, plan_shards, write_shard
from components.data.sources import open_source
from components.data.sources.base import Entry
from components.models.spec import ModelSpec
from components.train.epoch import EpochPlan, epoch_batches, make_batch, train_epoch
from components.train.feed import Feeding, TrainingSet, Worker
from components.train.objectives.settings import StandardSettings
from components.train.objectives.standard import Standard
from components.train.session import initial_model
from components.train.settings import TrainSettings
from pipelines.recipe import load as recipes
from pipelines.runtime.worker_env import FIXED_ENV
from tests.benchmarks.table import promise

LIMIT = 0.05  # share of a demo epoch
FASTEST = 0.02  # share of an epoch of a model that takes MODEL_SECONDS an image
MODEL_SECONDS = 0.0015
ROUNDS = 3
NUM_ITEMS, SHARD, BATCH, STORED, SIDE = 2560, 64, 64, 256, 224  # photographs: 40 shards
STANDARD = Standard(StandardSettings(), label_smoothing=0.0)
RAND = "rand-m9-mstd0.5-inc1"
CROP = AugmentSettings(crop="resized", flip=True)
RAND_AUGMENT = replace(CROP, rand_augment=RAND)


@dataclass(frozen=True)
class Photographs:
    """Crops of scikit-learn's two photographs."""

    classes: tuple[str, ...] = ("temple", "flower")

    def entries(self) -> list[Entry]:
        return [Entry(f"photo-{i}", i % 2, None, f"{i:05d}") for i in range(NUM_ITEMS)]

    def decode(self, entry: Entry) -> np.ndarray:
        rng, picture = np.random.default_rng(int(entry.locator)), PICTURES[entry.label]
        side = int(rng.integers(STORED, picture.shape[0]))
        top, left = (int(rng.integers(0, whole - side)) for whole in picture.shape[:2])
        crop = Image.fromarray(picture[top : top + side, left : left + side])
        return np.asarray(crop.resize((STORED, STORED), Image.Resampling.BICUBIC))


PICTURES = load_sample_images().images


def photographs(folder: Path, encoding: Encoding, num_items: int = NUM_ITEMS) -> TrainingSet:
    """The first photographs, stored in shards."""
    folder.mkdir()
    source = Photographs()
    entries = source.entries()[:num_items]
    job = open_job(source, entries, folder=folder, fitting=Fitting(), on_error="fail")
    plans = plan_shards({"train": entries}, shard_size=SHARD)
    text = describe_dataset(
        [write_shard(replace(job, encoding=encoding), plan) for plan in plans],
        classes=source.classes,
        shape=job.shape,
        split_names=("train",),
        encodings={"train": encoding},
        source={},
    )
    (folder / "dataset.json").write_text(text, encoding="utf-8")
    return TrainingSet(PreparedDataset.open(folder).lazy("train"))


def demo_digits(num_items: int) -> TrainingSet:
    """Real digits at the demo's size."""
    source, fitting = open_source("mnist5k", path=None), Fitting(32, "pad")
    entries = source.entries()[:: 5000 // num_items][:num_items]
    pixels = [fitting.apply(source.decode(e), item_id=e.item_id) for e in entries]
    images = torch.stack([torch.from_numpy(p.transpose(2, 0, 1)) for p in pixels])
    labels = torch.tensor([entry.label for entry in entries])
    return TrainingSet(ImageSplit(tuple(e.item_id for e in entries), images, labels))


def plan_of(augment: AugmentSettings, *, side: int = SIDE) -> EpochPlan:
    train = TrainSettings(batch_size=BATCH, augment=augment)
    return EpochPlan(train, seed=0, epochs=ROUNDS + 1, image_size=side)


def demo_wait_shares(data: TrainingSet) -> list[float]:
    """Share of each epoch that training spent waiting for a batch."""
    options = recipes.load("demo").model.options
    spec = ModelSpec("tiny_vit", 10, 1, 32, (0.5,), (0.5,), options=options)
    model, plan = initial_model(spec, seed=0), plan_of(AugmentSettings(), side=32)
    updater = plan.updater(model)
    shares = []
    for epoch in range(ROUNDS + 1):
        part = train_epoch(
            model, model, data, STANDARD, updater, plan=plan, epoch=epoch, worker=Worker(),
        )  # fmt: skip
        shares.append(part["wait_seconds"] * part["images_per_second"] / part["count"])
    return shares[1:]  # the first one warms up


# -- images per second of processor time


def batches(data: TrainingSet, plan: EpochPlan) -> Iterator[int]:
    """Items of each batch of an epoch, built by this thread."""
    shares, cpu = list(plan.batches(data).shares(0, Worker())), torch.device("cpu")
    with data.planned(torch.cat([share.index for share in shares])) as ready:
        for step, share in enumerate(shares):
            batch = make_batch(
                ready, share, plan=plan, num_classes=2, epoch=0, step=step, device=cpu
            )
            yield len(batch.images)


def batches_as_before(data: TrainingSet, plan: EpochPlan) -> Iterator[int]:
    """The same pixels from PNG as in the first version: batch by batch, through copies of it."""
    augment = plan.train.augment
    for share in plan.batches(data).shares(0, Worker()):
        rows = data.real.reader.rows(share.index.numpy())
        images, draws = torch.from_numpy(rows.images), Draws(tuple(rows.item_ids), 0, 0)
        words = draws.words()
        places = crop_boxes(draws, image=(STORED, STORED), scale=augment.scale, ratio=augment.ratio)
        crops = [
            resized_crop(
                image, *place, [SIDE, SIDE], interpolation=InterpolationMode.BICUBIC, antialias=True
            )
            for image, place in zip(images, places.tolist(), strict=True)
        ]
        framed = torch.stack(crops)
        mirrored = (words[:, 2] % 2 == 1)[:, None, None, None]
        framed = torch.where(mirrored, framed.flip(-1), framed)
        if augment.rand_augment:
            framed = rand_augment_as_before(framed, draws)
        yield len(framed.to(torch.float32) / 255)


def rand_augment_as_before(images: torch.Tensor, draws: Draws) -> torch.Tensor:
    rand = policy(RAND, fill=(128, 128, 128), interpolation="bicubic")
    drawn = draw_operations(rand, draws)
    arrays = images.permute(0, 2, 3, 1).numpy().copy()
    for row in np.flatnonzero(drawn.applied.any(axis=1)):
        picture = Image.fromarray(arrays[row])
        for layer in np.flatnonzero(drawn.applied[row]):
            picture = perform(
                rand.ops[drawn.operation[row, layer]],
                picture,
                level=float(drawn.level[row, layer]),
                negative=bool(drawn.negative[row, layer]),
            )
        arrays[row] = np.asarray(picture)
    return torch.from_numpy(arrays).permute(0, 3, 1, 2).contiguous()


def rate(run: Callable[[], Iterator[int]]) -> float:
    """Images per second of this process's processor time."""
    began = time.process_time()
    return sum(run()) / (time.process_time() - began)


def rates(sets: dict[str, TrainingSet]) -> dict[str, float]:
    """Medians of interleaved rounds, by stored format and augmentation."""
    found: dict[str, list[float]] = {}
    for _ in range(ROUNDS + 1):
        for name, augment in (("crop", CROP), ("RandAugment", RAND_AUGMENT)):
            plan = plan_of(augment)
            before = rate(lambda plan=plan: batches_as_before(sets["png"], plan))
            found.setdefault(f"before, {name}", []).append(before)
            for kind, data in sets.items():
                now = rate(lambda data=data, plan=plan: batches(data, plan))
                found.setdefault(f"{kind}, {name}", []).append(now)
    return {name: statistics.median(values[1:]) for name, values in found.items()}


# -- shards and waiting


def wait_share(data: TrainingSet) -> float:
    """Share of an epoch for which a model that takes MODEL_SECONDS an image waits for one thread.

    From the processor time of each batch: others on the machine would add to a measured wait.
    """
    plan, ahead, step = plan_of(CROP), Feeding.by_threads(1).num_ahead, MODEL_SECONDS * BATCH
    coming, built = batches(data, plan), []
    while True:
        began = time.thread_time()
        if next(coming, None) is None:
            break
        built.append(time.thread_time() - began)
    ready, taken, waited = 0.0, [0.0], 0.0  # when batches are built, and when steps begin
    for number, seconds in enumerate(built):
        room = taken[number + 1 - ahead] if number >= ahead else 0.0
        ready = max(ready, room) + seconds
        free = taken[-1] + step if number else 0.0
        waited += max(0.0, ready - free)
        taken.append(max(ready, free))
    return waited / (taken[-1] + step)


def feed(data: TrainingSet, *, num_threads: int) -> None:
    """An epoch of batches, which nobody uses."""
    spec = ModelSpec("tiny_vit", 2, 3, SIDE, (0.5,) * 3, (0.5,) * 3, options={"patch_size": 32})
    coming = epoch_batches(
        data, initial_model(spec, seed=0), plan=plan_of(CROP), epoch=0, worker=Worker(),
        feeding=Feeding.by_threads(num_threads),
    )  # fmt: skip
    with coming:
        for _ in coming:
            pass


def shard_reads(data: TrainingSet, num_threads: int) -> int:
    """Files that an epoch reads."""
    files, plain = [], stream.read_shard

    def reading(folder, shard, **options):
        files.append(shard.file)
        return plain(folder, shard, **options)

    stream.read_shard = reading
    try:
        feed(data, num_threads=num_threads)
    finally:
        stream.read_shard = plain
    return len(files)


def main() -> int:
    if any(os.environ.get(name) != value for name, value in FIXED_ENV.items()):
        command = [sys.executable, "-m", "tests.benchmarks.input"]
        os.execve(sys.executable, command, {**os.environ, **FIXED_ENV})
    torch.set_num_threads(1)
    jpeg = Encoding.of(DataSettings(source="mnist5k", train_format="jpeg"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fed = photographs(folder / "fed", jpeg)
        sets = {
            encoding.format: photographs(folder / encoding.format, encoding, num_items=256)
            for encoding in (PNG, jpeg, Encoding("raw"))
        }
        share = statistics.median(demo_wait_shares(demo_digits(2500)))
        speeds = rates(sets)
        reads = {threads: shard_reads(fed, threads) for threads in (1, 4, 8, 16)}
        waits = [wait_share(fed) for _ in range(ROUNDS)]
    print(json.dumps({
        "benchmark": "training input",
        "images_per_processor_second": {name: round(value) for name, value in speeds.items()},
        "shard_reads": reads, "shards": NUM_ITEMS // SHARD,
        "wait_shares": [round(wait, 4) for wait in waits],
        "load": round(os.getloadavg()[0], 1),
    }))  # fmt: skip
    kept = [
        promise(
            "share of an epoch that waits for data, demo", ratio=share, at_most=LIMIT,
            ours=f"{share:.2%}",
        ),
        promise(
            "share of an epoch that waits for data, 1.5 ms an image", at_most=FASTEST,
            ratio=statistics.median(waits), ours=f"{statistics.median(waits):.2%}",
        ),
        promise(
            "JPEG, random crop and flip at 224, images/s of a core",
            ratio=speeds["jpeg, crop"], at_least=1000,
            peer=f"PNG before {speeds['before, crop']:.0f}/s", ours=f"{speeds['jpeg, crop']:.0f}/s",
        ),
        promise(
            "JPEG, random crop, flip and RandAugment at 224 / PNG before",
            ratio=speeds["jpeg, RandAugment"] / speeds["before, RandAugment"], at_least=2,
            peer=f"PNG before {speeds['before, RandAugment']:.0f}/s",
            ours=f"{speeds['jpeg, RandAugment']:.0f}/s",
        ),
        promise(
            "most shard reads of an epoch, 1 to 16 threads / shards", at_most=1.1,
            ratio=max(reads.values()) * SHARD / NUM_ITEMS,
            ours=f"{max(reads.values())} of {NUM_ITEMS // SHARD}",
        ),
    ]  # fmt: skip
    return int(not all(kept))


if __name__ == "__main__":
    sys.exit(main())
