"""Training images decoded on the device of the model: a stand-in for a GPU decodes as the host."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from components.core.errors import CasemateError
from components.data import encodings
from components.data.encodings import Encoding, decode_jpegs, jpeg_decoder
from components.data.fitting import Fitting
from components.data.prepared import LazySplit, PreparedDataset
from components.data.settings import AugmentSettings
from components.data.shards import describe_dataset, open_job, plan_shards, write_shard
from components.data.sources.base import Entry
from components.train.epoch import EpochPlan, make_batch
from components.train.feed import Share, TrainingSet
from components.train.settings import TrainSettings
from pipelines.recipe.check import check
from pipelines.recipe.load import loads
from pipelines.stages.train.session import training_split
from tests.unit.host_syncs import DEVICE, HostSyncs

NUM_ITEMS, SIDE = 24, 16
JPEG = Encoding("jpeg", 95, "4:4:4", jpeg_decoder())


class Photos:
    """Smooth images, as JPEG likes them."""

    classes = ("zero", "one")

    def entries(self) -> list[Entry]:
        return [Entry(f"i{i}", i % 2, None, str(i)) for i in range(NUM_ITEMS)]

    def decode(self, entry: Entry) -> np.ndarray:
        steps = np.arange(SIDE) * (1 + int(entry.locator) % 7)
        image = np.add.outer(steps, steps)[..., None] + np.array([0, 40, 80])
        return (image % 256).astype(np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder, source = tmp_path_factory.mktemp("dataset"), Photos()
    entries = source.entries()
    job = replace(
        open_job(source, entries, folder=folder, fitting=Fitting(), on_error="fail"), encoding=JPEG
    )
    plans = plan_shards({"train": entries}, shard_size=8)
    text = describe_dataset(
        [write_shard(job, plan) for plan in plans],
        classes=source.classes,
        shape=job.shape,
        split_names=("train",),
        source={},
        encodings={"train": JPEG},
    )
    (folder / "dataset.json").write_text(text)
    return folder


@pytest.fixture
def on_host(folder) -> LazySplit:
    return PreparedDataset.open(folder).lazy("train")


def batch_of(split, device, augment):
    plan = EpochPlan(TrainSettings(augment=augment), seed=1, epochs=1, image_size=SIDE)
    order = torch.randperm(NUM_ITEMS, generator=torch.Generator().manual_seed(0))[:8]
    share = Share(order, torch.zeros(8, dtype=torch.int64))
    return make_batch(
        TrainingSet(split), share, plan=plan, num_classes=2, epoch=0, step=0, device=device
    )


AUGMENTS = {
    "none": AugmentSettings(),
    "crop and flip": AugmentSettings(crop="pad", pad=2, flip=True),
    "colours and noise": AugmentSettings(flip=True, jitter=0.4, rotation=10, erase_prob=0.9),
    "mixing": AugmentSettings(mixup=0.8, cutmix=1.0),
}


@pytest.mark.parametrize("name", AUGMENTS)
def test_batches_are_those_of_the_host_where_the_decoders_agree(name, on_host, monkeypatch):
    def decoded_there(contents, *, channels, device):
        assert device == DEVICE
        return decode_jpegs(contents, channels=channels, device=torch.device("cpu")).to(DEVICE)

    monkeypatch.setattr("components.data.prepared.decode_jpegs", decoded_there)
    expected = batch_of(on_host, torch.device("cpu"), AUGMENTS[name])
    with HostSyncs():
        found = batch_of(replace(on_host, decoded_on=DEVICE), DEVICE, AUGMENTS[name])
        assert found.images.device == found.labels.device == DEVICE
        images, labels = found.images.cpu(), found.labels.cpu()
    assert torch.allclose(images, expected.images, atol=1e-6)
    assert torch.equal(labels, expected.labels)
    assert found.item_ids == expected.item_ids


def test_a_batch_is_one_call_of_the_decoder(on_host, monkeypatch):
    calls = []

    def counted(contents, *, channels, device):
        calls.append(len(contents))
        return decode_jpegs(contents, channels=channels, device=device)

    monkeypatch.setattr("components.data.prepared.decode_jpegs", counted)
    here = replace(on_host, decoded_on=torch.device("cpu"))
    index = torch.tensor([3, 1, 20])
    found, expected = here.rows(index), on_host.rows(index)
    assert calls == [3]
    assert torch.equal(found.images, expected.images)
    assert found.item_ids == expected.item_ids
    assert torch.equal(found.labels, expected.labels)
    assert len(here.rows(torch.arange(0))) == 0
    reader = here.planned(index)
    with reader[1]:
        assert torch.equal(reader[0].rows(index).images, expected.images)


def test_a_device_that_cannot_decode_is_one_line(on_host):
    with pytest.raises(CasemateError, match=r"^train\.decode: device does not work on cuda.*host$"):
        replace(on_host, decoded_on=torch.device("cuda")).rows(torch.tensor([0]))


def test_the_split_of_a_training_follows_the_setting(folder):
    dataset, device = PreparedDataset.open(folder), torch.device("cpu")
    lazy = training_split(TrainSettings(decode="device"), dataset, device=device, limit=5)
    assert isinstance(lazy, LazySplit)
    assert (len(lazy), lazy.decoded_on) == (5, device)
    held = training_split(TrainSettings(), dataset, device=device, limit=5)
    assert torch.equal(held.images, lazy.rows(torch.arange(5)).images)


RECIPE = """
name: x
data: {{source: digits, train_format: {format}}}
train: {{decode: device}}
cluster: {{gpus_per_train_worker: {gpus}}}
"""


@pytest.mark.parametrize(
    ("stored", "gpus", "says"),
    [
        ("png", 1, "train.decode: device needs data.train_format: jpeg"),
        ("jpeg", 0, "train.decode: device needs GPUs; set cluster.gpus_per_train_worker"),
    ],
)
def test_the_gate_refuses_what_cannot_be_decoded_there(stored, gpus, says):
    with pytest.raises(CasemateError, match=says):
        check(loads(RECIPE.format(format=stored, gpus=gpus), source="x"))


def test_what_works_on_the_host_cannot_follow():
    with pytest.raises(ValueError, match="rand_augment, which works on the host"):
        TrainSettings(decode="device", augment=AugmentSettings(rand_augment="rand-m9-mstd0.5"))


def test_the_default_is_no_part_of_a_training():
    assert "decode" not in TrainSettings().plain_fields()
    assert encodings.DECODER == "torchcodec"
