"""Batches from shards: the same items for any number of workers and threads; who reads what."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from components.core.errors import CasemateError
from components.core.seeding import generator_for
from components.data import stream
from components.data.fitting import Fitting
from components.data.prepared import LazySplit, PreparedDataset
from components.data.settings import AugmentSettings
from components.data.shards import describe_dataset, open_job, plan_shards, write_shard
from components.data.sources.base import Entry
from components.models.spec import ModelSpec
from components.train.epoch import EpochPlan, epoch_batches, make_batch
from components.train.feed import BatchPlan, Feeding, Share, TrainingSet, Worker, by_slot
from components.train.session import initial_model
from components.train.settings import TrainSettings

NUM_SHARDS, SHARD, WINDOW, BATCH = 16, 16, 8, 32


class Noise:
    classes = ("zero", "one")

    def entries(self) -> list[Entry]:
        return [Entry(f"i{i}", i % 2, None, str(i)) for i in range(NUM_SHARDS * SHARD)]

    def decode(self, entry: Entry) -> np.ndarray:
        return np.random.default_rng(int(entry.locator)).integers(0, 256, (8, 8, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder, source = tmp_path_factory.mktemp("dataset"), Noise()
    entries = source.entries()
    job = open_job(source, entries, folder=folder, fitting=Fitting(), on_error="fail")
    plans = plan_shards({"train": entries}, shard_size=SHARD)
    text = describe_dataset(
        [write_shard(job, plan) for plan in plans],
        classes=source.classes,
        shape=job.shape,
        split_names=("train",),
        source={},
    )
    (folder / "dataset.json").write_text(text)
    return folder


@pytest.fixture
def split(folder) -> LazySplit:
    return PreparedDataset.open(folder).lazy("train", cache_shards=WINDOW)


@pytest.fixture
def read(monkeypatch) -> list[str]:
    """Files that were read."""
    files: list[str] = []
    plain = stream.read_shard

    def reading(folder, shard, **options):
        files.append(shard.file)
        return plain(folder, shard, **options)

    monkeypatch.setattr(stream, "read_shard", reading)
    return files


def settings(order: str, **augment) -> TrainSettings:
    return TrainSettings(batch_size=BATCH, order=order, augment=AugmentSettings(**augment))


def batches(
    split, train: TrainSettings, *, worker: Worker | None = None, threads: int = 1, first_step=0
):
    options = {"patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2}
    spec = ModelSpec("tiny_vit", 2, 3, 8, (0.5,) * 3, (0.5,) * 3, options=options)
    feed = epoch_batches(
        TrainingSet(split),
        initial_model(spec, seed=0),
        plan=EpochPlan(train, seed=3, epochs=2, image_size=8),
        epoch=1,
        worker=worker or Worker(),
        feeding=Feeding.by_threads(threads),
        first_step=first_step,
    )
    with feed:
        return list(feed)


@pytest.mark.parametrize("order", ["window", "balanced"])
@pytest.mark.parametrize(("world", "threads"), [(1, 4), (2, 1), (4, 2), (8, 1), (16, 1)])
def test_steps_hold_the_same_items_for_any_number_of_workers_and_threads(
    split, order, world, threads
):
    train = settings(order, flip=True, mixup=0.8)
    whole = batches(split, train)
    assert len(whole) == NUM_SHARDS * SHARD // BATCH
    assert len({i for batch in whole for i in batch.item_ids}) == NUM_SHARDS * SHARD
    parts = [
        batches(split, train, worker=Worker(rank, world), threads=threads) for rank in range(world)
    ]
    for step, batch in enumerate(whole):
        together = [part[step] for part in parts]
        assert batch.item_ids == tuple(i for part in together for i in part.item_ids)
        assert torch.equal(batch.images, torch.cat([part.images for part in together]))
        assert torch.equal(batch.targets, torch.cat([part.targets for part in together]))


@pytest.mark.parametrize("threads", [1, 4, 16])
@pytest.mark.parametrize("order", ["window", "balanced"])
def test_a_pass_reads_every_shard_once(split, read, order, threads):
    batches(split, settings(order), threads=threads)
    assert len(read) == len(set(read)) == NUM_SHARDS


@pytest.mark.parametrize("world", [2, 4, 8])
def test_each_worker_of_a_balanced_order_reads_its_own_shards(split, read, world):
    for rank in range(world):
        before = len(read)
        batches(split, settings("balanced"), worker=Worker(rank, world))
        assert len(read) - before == NUM_SHARDS / world
    assert len(set(read)) == NUM_SHARDS
    read.clear()
    batches(split, settings("window"), worker=Worker(0, world))
    assert len(read) > 0.8 * NUM_SHARDS  # the older order needs about all of them


def test_copies_of_an_item_share_a_worker_of_its_shard(split, read):
    train = settings("balanced", crop="pad", pad=1, copies=2)
    whole = batches(split, train)
    parts = [batches(split, train, worker=Worker(rank, 2)) for rank in (0, 1)]
    for step, batch in enumerate(whole):
        assert batch.item_ids == parts[0][step].item_ids + parts[1][step].item_ids
        assert len({name.split("#")[0] for name in batch.item_ids}) == BATCH // 2


def test_a_resumed_epoch_reads_what_is_left(split, read):
    whole = batches(split, settings("window"))
    read.clear()
    rest = batches(split, settings("window"), first_step=6)
    assert [batch.item_ids for batch in rest] == [batch.item_ids for batch in whole[6:]]
    assert len(read) == WINDOW  # of the second window


def test_the_older_order_is_the_default_and_as_it_was(split):
    plan = BatchPlan(TrainingSet(split), TrainSettings(batch_size=BATCH), 3)
    found = torch.cat([share.index for share in plan.shares(1, Worker())])

    assert torch.equal(found, split.order(generator_for(3, "shuffle", 1)))


def test_rows_are_sorted_by_slot_in_pairs():
    assert by_slot(torch.tensor([2, 9, 0, 1, 2, 2, 0, 0])).tolist() == [2, 3, 6, 7, 0, 1, 4, 5]
    assert by_slot(torch.tensor([2, 0, 1])).tolist() == [1, 2, 0]
    assert by_slot(torch.arange(0)).tolist() == []


def test_generated_images_have_no_balanced_order(split):
    data = TrainingSet(split, split, 0.5)
    with pytest.raises(CasemateError, match=r"train\.order: balanced cannot be combined"):
        BatchPlan(data, settings("balanced"), 3)
    plan = BatchPlan(data, replace(settings("balanced"), order="window"), 3)
    assert len(list(plan.shares(0, Worker()))) == 16


def test_generated_images_are_read_once_too(split, read, folder):
    made = PreparedDataset.open(folder).lazy("train", cache_shards=WINDOW)
    data = TrainingSet(split, made, 0.5)
    plan = BatchPlan(data, settings("window"), 3)
    shares = list(plan.shares(0, Worker()))
    with data.planned(torch.cat([share.index for share in shares])) as ready:
        for share in shares:
            assert ready.rows(share.index).item_ids == data.rows(share.index).item_ids
    assert ready.real is not data.real


@pytest.mark.parametrize(
    "augment",
    [
        {},
        {"flip": True},
        {"crop": "pad", "pad": 2, "flip": True},
        {"crop": "resized", "jitter": 0.2},
    ],
)
def test_streamed_batches_are_those_of_the_split_in_memory(split, folder, augment):
    whole = TrainingSet(PreparedDataset.open(folder).load("train"))
    plan = EpochPlan(settings("window", **augment), seed=3, epochs=2, image_size=8)
    cpu, share = torch.device("cpu"), Share(torch.tensor([3, 200, 17]), torch.zeros(3, dtype=int))

    def batch(data: TrainingSet) -> torch.Tensor:
        built = make_batch(data, share, plan=plan, num_classes=2, epoch=0, step=0, device=cpu)
        return built.images

    with TrainingSet(split).planned(share.index) as ready:
        streamed = batch(ready)
    assert torch.equal(streamed, batch(whole))
    assert streamed.is_contiguous()  # strides choose kernels, and these choose roundings
