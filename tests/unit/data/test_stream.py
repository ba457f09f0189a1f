"""Reading with bounded memory: few shards held, few rows decoded, and the same items as ever."""

import hashlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from components.core.errors import CasemateError
from components.data import encodings, stream
from components.data.fitting import Fitting
from components.data.prepared import (
    ImageSplit,
    LazySplit,
    PreparedDataset,
    balanced_order,
    windowed_order,
)
from components.data.shards import describe_dataset, open_job, plan_shards, write_shard
from components.data.sources.base import Entry

SHARD = 4
NUM_ITEMS = 22  # five whole shards and a half one


class Noise:
    classes = ("zero", "one")

    def entries(self) -> list[Entry]:
        return [Entry(f"noise-{i}", i % 2, None, str(i)) for i in range(NUM_ITEMS)]

    def decode(self, entry: Entry) -> np.ndarray:
        return np.random.default_rng(int(entry.locator)).integers(0, 256, (6, 6, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Training images stored at 9 x 9, test images at 6 x 6."""
    folder, source = tmp_path_factory.mktemp("dataset"), Noise()
    entries = source.entries()
    plans = plan_shards({"train": entries, "test": entries[:3]}, shard_size=SHARD)
    sizes = {"train": Fitting(9, "resize"), "test": Fitting(6, "resize")}
    jobs = {
        split: open_job(source, entries, folder=folder, fitting=fitting, on_error="fail")
        for split, fitting in sizes.items()
    }
    text = describe_dataset(
        [write_shard(jobs[plan.split], plan) for plan in plans],
        classes=source.classes,
        shape=jobs["test"].shape,
        split_shapes={split: job.shape for split, job in jobs.items()},
        split_names=("train", "test"),
        source={},
    )
    (folder / "dataset.json").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def dataset(folder) -> PreparedDataset:
    return PreparedDataset.open(folder)


class Spy:
    """Counts what the reader reads, checks and decodes."""

    def __init__(self, monkeypatch) -> None:
        self.read: list[str] = []
        self.checked = self.decoded = 0
        read_shard, sha256, decode = stream.read_shard, hashlib.sha256, encodings.decode_png

        def reading(folder, shard, **options):
            self.read.append(shard.file)
            return read_shard(folder, shard, **options)

        def checking(content):
            self.checked += 1
            return sha256(content)

        def decoding(content):
            self.decoded += 1
            return decode(content)

        monkeypatch.setattr(stream, "read_shard", reading)
        monkeypatch.setattr(stream.hashlib, "sha256", checking)
        monkeypatch.setattr(encodings, "decode_png", decoding)


@pytest.fixture
def spy(monkeypatch) -> Spy:
    return Spy(monkeypatch)


def equal(one: ImageSplit, other: ImageSplit) -> bool:
    return (
        one.item_ids == other.item_ids
        and torch.equal(one.images, other.images)
        and torch.equal(one.labels, other.labels)
    )


@pytest.mark.parametrize("cache_shards", [1, 2, 99])
@pytest.mark.parametrize("index", [[], [5], [21, 0, 0, 13], list(range(22))[::-1]])
def test_rows_are_those_of_the_split_in_memory(dataset, cache_shards, index):
    whole, lazy = dataset.load("train"), dataset.lazy("train", cache_shards=cache_shards)
    assert len(lazy) == len(whole) == NUM_ITEMS
    assert equal(
        lazy.rows(torch.tensor(index, dtype=torch.int64)),
        whole.rows(torch.tensor(index, dtype=torch.int64)),
    )
    assert equal(lazy.span(3, 9), whole.span(3, 9))
    assert equal(lazy.span(20, 99), whole.span(20, 99))
    assert equal(lazy.take(5), whole.take(5))
    assert len(lazy.span(9, 9)) == 0


def test_only_asked_rows_are_decoded_and_only_their_shards_read(dataset, spy):
    dataset.lazy("train").rows(torch.tensor([1, 20, 2]))
    assert (spy.read, spy.decoded) == (["train-00000.parquet", "train-00005.parquet"], 3)
    dataset.load("train", limit=5)
    assert spy.read[2:] == ["train-00000.parquet", "train-00001.parquet"]
    assert spy.decoded == 3 + 5
    dataset.lazy("train").span(9, 11)
    assert spy.read[4:] == ["train-00002.parquet"]


@pytest.mark.parametrize("index", [[], [5], [21, 0, 0, 13], list(range(22))[::-1]])
def test_items_on_demand_are_read_and_decoded_once(dataset, spy, index):
    whole = dataset.load("train")
    del spy.read[:]
    spy.decoded = 0
    split = dataset.on_demand("train")
    asked = torch.tensor(index, dtype=torch.int64)
    for _ in range(2):
        assert equal(split.rows(asked), whole.rows(asked))
    assert spy.decoded == len(set(index))
    assert len(spy.read) == len({place // 4 for place in index})  # four items in a shard
    assert equal(split.span(3, 9), whole.span(3, 9))
    assert equal(split.take(99), whole.take(99))
    assert len(split.span(9, 9)) == 0
    assert spy.decoded == len(split) == NUM_ITEMS


def test_the_least_recent_shard_leaves_and_is_checked_once(dataset, spy):
    lazy = dataset.lazy("train", cache_shards=2)
    for item in (0, 4, 1, 8, 2, 5):  # shards 0, 1, 0, 2 (1 leaves), 0, 1 (2 leaves)
        lazy.rows(torch.tensor([item]))
        assert len(lazy.reader._tables) <= 2
    assert [int(file[6:11]) for file in spy.read] == [0, 1, 2, 1]
    assert spy.checked == 3  # the second reading of shard 1 trusts the first


def test_an_epoch_reads_every_shard_once_with_a_cache_of_one_window(dataset, spy):
    lazy = dataset.lazy("train", cache_shards=2)
    order = lazy.order(torch.Generator().manual_seed(0))
    assert sorted(order.tolist()) == list(range(NUM_ITEMS))
    for batch in order.split(5):  # batches straddle the windows
        lazy.rows(batch)
    assert sorted(spy.read) == [f"train-{number:05d}.parquet" for number in range(6)]
    assert spy.decoded == NUM_ITEMS


def test_threads_share_a_reader(dataset, spy):
    whole, lazy = dataset.load("train"), dataset.lazy("train", cache_shards=6)
    num_read = len(spy.read)
    index = [torch.randperm(NUM_ITEMS)[:7] for _ in range(40)]
    with ThreadPoolExecutor(8) as pool:
        for asked, rows in zip(index, pool.map(lazy.rows, index), strict=True):
            assert equal(rows, whole.rows(asked))
    assert len(spy.read) - num_read == 6


def test_positions_outside_are_our_own_mistake(dataset):
    for index in (-1, NUM_ITEMS):
        with pytest.raises(IndexError, match=r"outside 0\.\.21"):
            dataset.lazy("train").rows(torch.tensor([index]))
    with pytest.raises(ValueError, match="cache_shards"):
        dataset.lazy("train", cache_shards=0)


def test_damage_is_named_when_the_shard_is_first_used(folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    shard = tmp_path / "train-00003.parquet"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    lazy = PreparedDataset.open(tmp_path).lazy("train")
    assert len(lazy.span(0, 12)) == 12
    with pytest.raises(CasemateError, match=r"train-00003\.parquet is damaged"):
        lazy.span(0, 13)


# -- one pass, read ahead


def positions_of(shards: list[int]) -> torch.Tensor:
    return torch.tensor([number * SHARD for number in shards])


@pytest.mark.parametrize("num_threads", [1, 4, 16])
def test_a_planned_pass_reads_every_shard_once(dataset, spy, num_threads):
    whole, lazy = dataset.load("train"), dataset.lazy("train", cache_shards=1)
    order = lazy.order(torch.Generator().manual_seed(1))
    spy.read.clear()
    ready, reader = lazy.planned(order)
    batches = order.split(3)  # they straddle the windows
    with reader, ThreadPoolExecutor(num_threads) as pool:
        for batch, rows in zip(batches, pool.map(ready.rows, batches), strict=True):
            assert equal(rows, whole.rows(batch))
        assert not reader._tables  # each left after its last use
    assert sorted(spy.read) == [f"train-{number:05d}.parquet" for number in range(6)]


def test_two_windows_are_read_ahead_and_no_more(dataset, spy):
    lazy = dataset.lazy("train", cache_shards=2)
    ready, reader = lazy.planned(positions_of([5, 1, 0, 3, 2, 4]))
    with reader:
        assert spy.read == []  # nothing before the first request
        ready.rows(positions_of([5]))
        until(lambda: len(spy.read) == 5)  # shard 5 is used up, four more fit
        assert {int(file[6:11]) for file in spy.read} == {5, 1, 0, 3, 2}
        time.sleep(0.02)
        assert len(reader._tables) == 4
        ready.rows(positions_of([1, 0]))
        until(lambda: len(spy.read) == 6)
    assert not reader._tables
    assert not any(thread.name.startswith("read-ahead") for thread in threading.enumerate())


def test_a_reader_far_ahead_does_not_wait_for_room(dataset, spy):
    lazy = dataset.lazy("train", cache_shards=1)
    ready, reader = lazy.planned(positions_of([0, 1, 2, 3, 4, 5]))
    with reader:
        assert len(ready.rows(positions_of([5, 4, 3, 2, 1]))) == 5  # shard 0 stays in memory
        assert len(ready.rows(positions_of([0]))) == 1
        assert len(ready.rows(positions_of([0]))) == 1  # not planned: read again, and not kept
        assert not reader._tables
    assert len(spy.read) == 7


def test_damage_ahead_is_told_to_the_reader_of_the_item(folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "train-00003.parquet").write_bytes(b"x")
    lazy = PreparedDataset.open(tmp_path).lazy("train", cache_shards=2)
    ready, reader = lazy.planned(torch.arange(len(lazy)))
    with reader:
        for _ in range(2):
            assert len(ready.rows(torch.arange(4, 8))) == 4
            with pytest.raises(CasemateError, match=r"train-00003\.parquet is damaged"):
                ready.rows(torch.arange(12, 14))


def test_files_are_checked_once_in_all_passes(dataset, spy):
    lazy = dataset.lazy("train")
    for _ in range(3):
        ready, reader = lazy.planned(torch.arange(NUM_ITEMS))
        with reader:
            ready.rows(torch.arange(NUM_ITEMS))
    assert (len(spy.read), spy.checked) == (18, 6)


def test_different_files_are_read_at_the_same_time(dataset, monkeypatch):
    read, both = stream.read_shard, threading.Barrier(2, timeout=20)

    def reading(*args, **options):
        both.wait()  # would break if the second read waited for the first
        return read(*args, **options)

    monkeypatch.setattr(stream, "read_shard", reading)
    lazy = dataset.lazy("train", cache_shards=2)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lazy.rows, [torch.tensor([0]), torch.tensor([9])]))
    assert [rows.item_ids for rows in found] == [("noise-0",), ("noise-9",)]


def until(condition) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


# -- sizes


def test_each_split_has_its_own_size(dataset):
    assert (dataset.height, dataset.width) == (6, 6)
    assert dataset.sides == {"train": (9, 9), "test": (6, 6)}
    assert dataset.load("train", limit=1).images.shape == (1, 3, 9, 9)
    assert dataset.load("test", limit=1).images.shape == (1, 3, 6, 6)


def test_pages_that_name_one_size_are_still_read(folder, tmp_path):
    for path in folder.glob("test*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    page = json.loads((folder / "dataset.json").read_text())
    for split in page["splits"].values():
        del split["height"], split["width"]
    (tmp_path / "dataset.json").write_text(json.dumps(page))
    dataset = PreparedDataset.open(tmp_path)
    assert dataset.sides == {"train": (6, 6), "test": (6, 6)}
    assert equal(dataset.load("test"), PreparedDataset.open(folder).load("test"))


def test_the_size_of_the_data_chooses_between_memory_and_disk(dataset, monkeypatch):
    assert isinstance(dataset.open_split("train", memory_mb=1), ImageSplit)
    assert isinstance(dataset.open_split("train", memory_mb=0), LazySplit)
    megabyte = 2**20 // (3 * 9 * 9)  # items that fill one
    for num_items, kind in ((megabyte, ImageSplit), (megabyte + 1, LazySplit)):
        shard = stream.StoredShard("train-00000.parquet", "", num_items)
        monkeypatch.setitem(dataset._shards, "train", (shard,))
        monkeypatch.setattr(
            PreparedDataset, "load", lambda *_, limit: ImageSplit((), *[torch.empty(0)] * 2)
        )
        assert isinstance(dataset.open_split("train", memory_mb=1), kind)


@pytest.mark.parametrize("limit", [0, 1, 3, 5, 99])
def test_the_first_items_of_a_split_on_disk_are_a_split(dataset, spy, limit):
    part = dataset.open_split("train", memory_mb=0, limit=limit)
    whole = dataset.load("train", limit=limit)
    spy.read.clear()
    assert len(part) == len(whole)
    order = part.order(torch.Generator().manual_seed(0))
    assert sorted(order.tolist()) == list(range(len(whole)))
    assert equal(part.rows(order), whole.rows(order))
    assert equal(part.take(99), whole)


# -- order


@given(st.lists(st.integers(0, 6), max_size=8), st.integers(1, 9), st.integers(0, 99))
def test_windowed_order_is_a_permutation_that_stays_near(sizes, window, seed):
    generator = torch.Generator().manual_seed(seed)
    order = windowed_order(sizes, window=window, generator=generator).tolist()
    assert sorted(order) == list(range(sum(sizes)))
    owner = [number for number, size in enumerate(sizes) for _ in range(size)]
    places: dict[int, list[int]] = {}
    for place, item in enumerate(order):
        places.setdefault(owner[item], []).append(place)
    starts = sorted((min(p), max(p)) for p in places.values())
    for place in range(len(order)):  # nowhere are more shards open than the window holds
        assert sum(first <= place <= last for first, last in starts) <= window


def test_windowed_order_shuffles_shards_and_items():
    def order(seed: int, window: int = 2) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return windowed_order([50] * 6, window=window, generator=generator).tolist()

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert len({tuple(sorted({i // 50 for i in order(seed)[:100]})) for seed in range(30)}) > 5
    window = [i // 50 for i in order(1)[:100]]
    assert 30 < sum(a != b for a, b in pairwise(window)) < 70  # two shards, thoroughly mixed
    assert len({i // 50 for i in order(1, window=6)[:60]}) == 6


@given(st.lists(st.integers(0, 7), max_size=8), st.integers(1, 9), st.integers(0, 99))
def test_balanced_order_is_a_permutation_window_by_window(sizes, window, seed):
    generator = torch.Generator().manual_seed(seed)
    order, slots = balanced_order(sizes, window=window, generator=generator)
    assert sorted(order.tolist()) == list(range(sum(sizes)))
    plain = torch.Generator().manual_seed(seed)
    queue = torch.randperm(len(sizes), generator=plain).tolist()
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes, dtype=int))
    opened = [queue.index(number) for number in owner[order].tolist()]
    assert [place // window for place in opened] == sorted(place // window for place in opened)
    assert slots[order].tolist() == [place % window for place in opened]


def test_parts_of_a_balanced_order_hold_equally_many_items_of_each_shard():
    def order(seed: int):
        generator = torch.Generator().manual_seed(seed)
        return balanced_order([48] * 9, window=3, generator=generator).order

    assert torch.equal(order(1), order(1))
    assert not torch.equal(order(1), order(2))
    for window in order(1).split(3 * 48):
        for part in window.split(12):
            counts = torch.bincount(part // 48, minlength=9)
            assert counts[counts > 0].tolist() == [4, 4, 4]
            shards = (part // 48).tolist()
            assert shards[::2] == shards[1::2]  # pairs, for mixing
