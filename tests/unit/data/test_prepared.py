"""The prepared format: lossless, deterministic, resumable, and refused when damaged."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from components.core.errors import CasemateError
from components.data.encodings import decode_png, encode_png
from components.data.fitting import Fitting
from components.data.prepared import ImageSplit, PreparedDataset
from components.data.shards import (
    ShardJob,
    ShardPlan,
    describe_dataset,
    finished_record,
    open_job,
    plan_shards,
    record_path,
    write_shard,
)
from components.data.sources import open_source
from components.data.sources.base import Entry


class Noise:
    """A source of random images whose pixels follow from the locator."""

    classes = ("zero", "öne")

    def __init__(self, num_items: int = 10, shift: int = 0) -> None:
        self.num_items = num_items
        self.shift = shift
        self.num_decoded = 0

    def entries(self) -> list[Entry]:
        return [Entry(f"noise-{i}", i % 2, None, str(i)) for i in range(self.num_items)]

    def decode(self, entry: Entry) -> np.ndarray:
        self.num_decoded += 1
        rng = np.random.default_rng(int(entry.locator) + self.shift)
        return rng.integers(0, 256, (5, 4, 3), dtype=np.uint8)


def splits_of(source: Noise) -> dict[str, list[Entry]]:
    entries = source.entries()
    return {"train": entries[3:], "val": [], "test": entries[:3]}


def write_dataset(folder: Path, source: Noise, *, shard_size: int, splits=None) -> PreparedDataset:
    folder.mkdir(exist_ok=True)
    plans = plan_shards(splits or splits_of(source), shard_size=shard_size)
    job = new_job(folder, source)
    records = [write_shard(job, plan) for plan in plans]
    text = describe_dataset(
        records,
        classes=source.classes,
        shape=job.shape,
        split_names=("train", "val", "test"),
        source={},
    )
    (folder / "dataset.json").write_text(text, encoding="utf-8")
    return PreparedDataset.open(folder)


def new_job(folder: Path, source, *, on_error: str = "fail", **fitting) -> ShardJob:
    return open_job(
        source, source.entries(), folder=folder, fitting=Fitting(**fitting), on_error=on_error
    )


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 3]), st.integers(0, 99))
def test_images_survive_encoding(height, width, channels, seed):
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (height, width, channels), dtype=np.uint8)
    assert np.array_equal(decode_png(encode_png(pixels)), pixels)


def test_written_items_are_read_back_in_stored_order(tmp_path):
    source = Noise()
    dataset = write_dataset(tmp_path, source, shard_size=3)
    assert dataset.classes == ("zero", "öne")
    assert (dataset.channels, dataset.height, dataset.width) == (3, 5, 4)
    assert dataset.splits == {"train": 7, "val": 0, "test": 3}
    split = dataset.load("train")
    assert split.item_ids == tuple(f"noise-{i}" for i in range(3, 10))
    assert split.labels.tolist() == [1, 0, 1, 0, 1, 0, 1]
    assert split.images.dtype == torch.uint8
    for row, entry in enumerate(splits_of(source)["train"]):
        assert np.array_equal(split.images[row].permute(1, 2, 0).numpy(), source.decode(entry))
    assert len(dataset.load("val")) == 0
    assert dataset.load("val").images.shape == (0, 3, 5, 4)


def test_shard_files_have_the_documented_columns(tmp_path):
    write_dataset(tmp_path, Noise(), shard_size=100)
    schema = pq.read_schema(tmp_path / "train-00000.parquet")
    assert [(f.name, str(f.type)) for f in schema] == [
        ("item_id", "string"),
        ("image", "binary"),
        ("height", "int32"),
        ("width", "int32"),
        ("label", "int32"),
    ]


@pytest.mark.parametrize("limit", [0, 1, 3, 4, 7, 99])
def test_limit_reads_the_first_items_and_only_their_shards(tmp_path, limit):
    dataset = write_dataset(tmp_path, Noise(), shard_size=3)
    whole = dataset.load("train")
    for number in range(-(-min(limit, 7) // 3), 3):
        (tmp_path / f"train-{number:05d}.parquet").unlink()  # must not be needed
    part = dataset.load("train", limit=limit)
    assert part.item_ids == whole.item_ids[:limit]
    assert torch.equal(part.images, whole.images[:limit])


def test_pixels_and_take():
    images = torch.arange(256, dtype=torch.uint8).reshape(4, 1, 8, 8)
    split = ImageSplit(("a", "b", "c", "d"), images, torch.tensor([0, 1, 2, 3]))
    expected = (np.arange(256) / 255).astype(np.float32).reshape(4, 1, 8, 8)
    assert np.array_equal(split.pixels().numpy(), expected)
    assert np.array_equal(split.pixels(slice(1, 3)).numpy(), expected[1:3])
    assert np.array_equal(split.pixels(torch.tensor([3, 0])).numpy(), expected[[3, 0]])
    assert split.take(2).item_ids == ("a", "b")
    assert split.take(2).labels.tolist() == [0, 1]
    with pytest.raises(ValueError, match="length"):
        ImageSplit(("a",), images, torch.tensor([0]))


# -- digest


def test_digest_ignores_shard_layout(tmp_path):
    digests = {
        write_dataset(tmp_path / str(size), Noise(), shard_size=size).digest for size in (1, 3, 100)
    }
    assert len(digests) == 1


def test_digest_sees_pixels_labels_ids_classes_and_splits(tmp_path):
    base = Noise()
    plain = splits_of(base)
    relabelled = [Entry("noise-3", 0, None, "3"), *plain["train"][1:]]
    renamed = [Entry("noise-x", 1, None, "3"), *plain["train"][1:]]
    moved = {"train": plain["train"][1:], "val": plain["train"][:1], "test": plain["test"]}
    other_classes = Noise()
    other_classes.classes = ("zero", "one")
    variants = [
        (base, plain),
        (Noise(shift=1), plain),
        (base, {**plain, "train": relabelled}),
        (base, {**plain, "train": renamed}),
        (base, moved),
        (other_classes, plain),
    ]
    digests = {
        write_dataset(tmp_path / str(i), source, shard_size=4, splits=splits).digest
        for i, (source, splits) in enumerate(variants)
    }
    assert len(digests) == len(variants)


# -- damage


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "swapped"])
def test_damaged_shard_is_refused_by_name(tmp_path, damage):
    dataset = write_dataset(tmp_path, Noise(), shard_size=3)
    shard = tmp_path / "train-00001.parquet"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "missing":
        shard.unlink()
    elif damage == "swapped":
        shard.write_bytes((tmp_path / "train-00000.parquet").read_bytes())
    else:
        shard.write_bytes(content if damage == "flipped" else content[:-10])
    with pytest.raises(CasemateError, match=r"train-00001\.parquet"):
        dataset.load("train")
    assert len(dataset.load("train", limit=3)) == 3  # the first shard is unharmed


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "is missing"), ("{", "not JSON"), ("[]", "format"), ('{"format": "x/9"}', "x/9")],
)
def test_unusable_dataset_page_is_explained(tmp_path, text, message):
    if text is not None:
        (tmp_path / "dataset.json").write_text(text)
    with pytest.raises(CasemateError, match=message):
        PreparedDataset.open(tmp_path)


def test_unknown_split_is_named(tmp_path):
    with pytest.raises(CasemateError, match="dev is not one of train, val, test"):
        write_dataset(tmp_path, Noise(), shard_size=3).load("dev")


# -- writing and resuming


def test_plans_survive_the_way_to_a_worker():
    plans = plan_shards({"train": [Entry("ü | x", 1, None, "l", "v")]}, shard_size=2)
    assert [ShardPlan.unpacked(plan.packed()) for plan in plans] == plans


def test_finished_shard_is_kept_and_changed_ones_are_written_again(tmp_path):
    source = Noise()
    (plan,) = plan_shards({"train": source.entries()}, shard_size=100)
    job = new_job(tmp_path, source)
    first = write_shard(job, plan)
    content = (tmp_path / plan.file).read_bytes()
    source.num_decoded = 0
    assert write_shard(job, plan) == first
    assert source.num_decoded == 0

    (tmp_path / plan.file).write_bytes(content[:-1])  # killed disk
    assert write_shard(job, plan) == first
    assert source.num_decoded == 10
    assert (tmp_path / plan.file).read_bytes() == content

    record_path(tmp_path, plan.file).write_text("{")
    assert finished_record(job, plan) is None


def test_record_of_another_plan_is_not_taken(tmp_path):
    source = Noise()
    entries = source.entries()
    (plan,) = plan_shards({"train": entries}, shard_size=100)
    write_shard(new_job(tmp_path, source), plan)
    newer = [Entry(e.item_id, e.label, None, e.locator, "touched") for e in entries]
    (touched,) = plan_shards({"train": newer}, shard_size=100)
    assert finished_record(new_job(tmp_path, source), plan) is not None
    assert finished_record(new_job(tmp_path, source), touched) is None
    assert finished_record(new_job(tmp_path, source, image_size=8), plan) is None


def test_failed_shard_leaves_no_file(tmp_path):
    class Broken(Noise):
        def decode(self, entry):
            if entry.locator == "7":
                raise CasemateError("data.path", "x", "is bad")
            return super().decode(entry)

    source = Broken()
    (plan,) = plan_shards({"train": source.entries()}, shard_size=100)
    with pytest.raises(CasemateError, match="is bad"):
        write_shard(new_job(tmp_path, source), plan)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def mixed_root(tmp_path: Path) -> Path:
    root = tmp_path / "images"
    for name in ("a", "b"):
        (root / name).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (6, 6), (number, 9, 9)).save(root / name / f"{number}.png")
    return root


def only_shard(job: ShardJob):
    (plan,) = plan_shards({"train": job.source.entries()}, shard_size=100)
    return write_shard(job, plan)


@pytest.mark.parametrize(
    ("odd", "message", "key", "remedy"),
    [
        (
            Image.new("RGB", (6, 7)),
            r"folder-b/1\.png is 7x6x3 while folder-a/0\.png",
            "data.image_size",
            {"image_size": 8},
        ),
        (
            Image.new("L", (6, 6)),
            r"folder-b/1\.png is 6x6x1",
            "data.channels",
            {"channels": 1},
        ),
    ],
    ids=["size", "channels"],
)
def test_an_odd_image_is_named_with_its_remedy(mixed_root, tmp_path, odd, message, key, remedy):
    odd.save(mixed_root / "b" / "1.png")
    source = open_source("folder", path=str(mixed_root))
    with pytest.raises(CasemateError, match=message) as e:
        only_shard(new_job(tmp_path, source))
    assert e.value.key == key
    assert len(only_shard(new_job(tmp_path, source, **remedy)).item_digests) == 6


def test_undecodable_items_fail_or_are_named(mixed_root, tmp_path):
    for file in ("a/0.png", "b/2.png"):  # the very first entry too
        (mixed_root / file).write_bytes(b"no image")
    source = open_source("folder", path=str(mixed_root))
    with pytest.raises(CasemateError, match=r"0\.png is not a readable image"):
        new_job(tmp_path, source)
    record = only_shard(new_job(tmp_path, source, on_error="skip"))
    assert [item["item_id"] for item in record.skipped] == ["folder-a/0.png", "folder-b/2.png"]
    assert len(record.item_digests) == 4
    text = describe_dataset(
        [record], classes=source.classes, shape=(6, 6, 3), split_names=["train"], source={}
    )
    page = json.loads(text)
    assert [item["split"] for item in page["skipped"]] == ["train", "train"]
    assert page["splits"]["train"]["num_items"] == 4


def test_settings_are_checked(tmp_path):
    with pytest.raises(CasemateError, match=r"data\.on_error"):
        new_job(tmp_path, Noise(), on_error="ignore")
    with pytest.raises(CasemateError, match=r"data\.shard_size"):
        plan_shards({"train": Noise().entries()}, shard_size=0)
