"""What a training eats: the same global batches for any number of workers, built ahead in order."""

import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from components.core.errors import CasemateError
from components.core.seeding import generator_for
from components.data.prepared import ImageSplit
from components.data.settings import AugmentSettings
from components.train.feed import BatchPlan, Feed, Feeding, TrainingSet, Worker
from components.train.settings import TrainSettings


def with_copies(batch_size: int, **augment) -> TrainSettings:
    return TrainSettings(batch_size=batch_size, augment=AugmentSettings(**augment))


def split(num_items: int, *, prefix: str = "real") -> ImageSplit:
    images = torch.arange(num_items, dtype=torch.uint8)[:, None, None, None]
    ids = tuple(f"{prefix}-{i}" for i in range(num_items))
    return ImageSplit(ids, images, torch.arange(num_items) % 3)


def batches(plan: BatchPlan, *, epoch: int = 0, rank: int = 0, world: int = 1) -> list[list[int]]:
    return [share.index.tolist() for share in plan.shares(epoch, Worker(rank, world))]


def plain(num_items: int, batch_size: int) -> BatchPlan:
    return BatchPlan(TrainingSet(split(num_items)), TrainSettings(batch_size=batch_size), 3)


def mixture(num_real: int, num_made: int, *, batch_size: int, ratio: float = 0.5) -> BatchPlan:
    data = TrainingSet(split(num_real), split(num_made, prefix="made"), ratio)
    return BatchPlan(data, TrainSettings(batch_size=batch_size), 3)


# -- order and shares


@given(st.integers(1, 60), st.integers(1, 8), st.integers(1, 4), st.integers(0, 3))
def test_workers_partition_the_batches_of_one_worker(num_items, share, world, epoch):
    plan = plain(num_items, share * world)
    whole = batches(plan, epoch=epoch)
    seen = [item for batch in whole for item in batch]
    assert len(set(seen)) == len(seen)
    assert set(seen) <= set(range(num_items))
    if num_items < world:
        return  # refused, see below
    parts = [batches(plan, epoch=epoch, rank=rank, world=world) for rank in range(world)]
    assert {len(part) for part in parts} == {plan.num_batches}
    for step, batch in enumerate(whole):
        together = [item for part in parts for item in part[step]]
        assert len({len(part[step]) for part in parts}) == 1  # equal shares: a plain mean is right
        if num_items >= plan.train.batch_size or num_items % world == 0:
            assert together == batch
        else:  # a small set that cannot be shared evenly loses its remainder, nothing else
            assert together == batch[: num_items - num_items % world]


def test_plain_training_follows_the_permutation_of_seed_and_epoch():
    for epoch in range(3):
        order = torch.randperm(22, generator=generator_for(3, "shuffle", epoch)).tolist()
        assert batches(plain(22, 8), epoch=epoch) == [order[:8], order[8:16]]


class OnDisk(ImageSplit):
    """Items that suggest an order of their own."""

    def order(self, generator: torch.Generator) -> torch.Tensor:
        return torch.arange(len(self)).flip(0)


def test_the_data_decides_which_random_order_suits_it():
    own = OnDisk(*(getattr(split(10), name) for name in ("item_ids", "images", "labels")))
    plan = BatchPlan(TrainingSet(own), TrainSettings(batch_size=4), 3)
    assert batches(plan) == [[9, 8, 7, 6], [5, 4, 3, 2]]


def test_a_set_smaller_than_a_batch_is_one_batch():
    assert [len(batch) for batch in batches(plain(3, 64))] == [3]
    assert [len(batch) for batch in batches(plain(130, 64))] == [64, 64]


def test_a_batch_that_cannot_be_shared_is_refused():
    with pytest.raises(ValueError, match="cannot be shared by 4 workers"):
        batches(plain(3, 64), world=4)
    with pytest.raises(CasemateError, match="nothing to train on"):
        plain(0, 8)


def test_copies_are_counted_apart():
    data = TrainingSet(split(24))
    repeated = BatchPlan(data, with_copies(6, copies=3), 3)
    shares = list(repeated.shares(0, Worker()))
    assert repeated.num_batches == len(shares) == 4  # an epoch keeps its length
    for share in shares:
        assert sorted(share.copies.tolist()) == [0, 0, 1, 1, 2, 2]
        assert len(set(share.index.tolist())) == 2
    divided = BatchPlan(data, with_copies(6, copies=3, clean_copy=True), 3)
    shares = list(divided.shares(0, Worker()))
    assert divided.num_batches == len(shares) == 12  # every item in three copies
    pairs = [
        (item, copy)
        for share in shares
        for item, copy in zip(share.index.tolist(), share.copies.tolist(), strict=True)
    ]
    assert sorted(pairs) == [(item, copy) for item in range(24) for copy in range(3)]


# -- generated images


def test_half_of_every_batch_is_generated_and_an_epoch_covers_the_real_images_once():
    plan = mixture(320, 1000, batch_size=64)
    for epoch in range(2):
        whole = batches(plan, epoch=epoch)
        assert len(whole) == 10
        assert [sum(item < 320 for item in batch) for batch in whole] == [32] * 10
        real = [item for batch in whole for item in batch if item < 320]
        assert sorted(real) == list(range(320))
    positions = {tuple(i for i, item in enumerate(batch) if item < 320) for batch in whole}
    assert len(positions) == 10  # shuffled anew in every step


@given(
    st.integers(1, 40),
    st.integers(1, 30),
    st.integers(2, 20),
    st.sampled_from([0.1, 0.25, 0.5, 0.7, 0.9]),
)
def test_generated_images_take_turns_over_the_epochs(num_real, num_made, batch_size, ratio):
    if int(batch_size * ratio) == 0 or num_real < batch_size:
        return
    plan = mixture(num_real, num_made, batch_size=batch_size, ratio=ratio)
    real, generated = plan.parts
    assert (real, generated) == (batch_size - int(batch_size * ratio), int(batch_size * ratio))
    counts = [0] * num_made
    for epoch in range(3):
        for batch in batches(plan, epoch=epoch):
            made = [item - num_real for item in batch if item >= num_real]
            assert len(made) == generated
            for item in made:
                counts[item] += 1
        assert max(counts) - min(counts) <= 1  # nobody comes twice before all came once


def test_workers_share_a_mixed_batch():
    plan = mixture(40, 100, batch_size=12, ratio=0.3)
    whole = batches(plan, epoch=1)
    parts = [batches(plan, epoch=1, rank=rank, world=4) for rank in range(4)]
    assert whole == [[i for part in parts for i in part[step]] for step in range(len(whole))]


def test_rows_of_both_kinds_keep_their_places():
    data = TrainingSet(split(5), split(4, prefix="made"), 0.5)
    rows = data.rows(torch.tensor([6, 0, 8, 4, 5]))
    assert rows.item_ids == ("made-1", "real-0", "made-3", "real-4", "made-0")
    assert rows.images.flatten().tolist() == [1, 0, 3, 4, 0]
    assert rows.labels.tolist() == [1, 0, 0, 1, 0]


def test_mixtures_that_cannot_be_are_refused():
    with pytest.raises(CasemateError, match="not a whole image"):
        mixture(10, 10, batch_size=4, ratio=0.2)
    with pytest.raises(CasemateError, match=r"outside \[0, 1\)"):
        mixture(10, 10, batch_size=4, ratio=1.0)
    with pytest.raises(CasemateError, match="cannot be combined"):
        BatchPlan(TrainingSet(split(9), split(9), 0.5), with_copies(4, copies=2), 3)
    with pytest.raises(ValueError, match=r"ratio 0\.5"):
        TrainingSet(split(9), None, 0.5)


# -- building ahead


@pytest.mark.parametrize("num_threads", [1, 3])
def test_parts_come_in_order_whatever_the_threads(num_threads):
    def slow_first(number: int) -> int:
        time.sleep(0.01 if number % 3 == 0 else 0)
        return number * number

    feeding = Feeding(num_threads=num_threads, num_ahead=4)
    with Feed(slow_first, range(20), feeding=feeding) as feed:
        assert list(feed) == [number * number for number in range(20)]


def test_at_most_so_many_are_built_ahead():
    started: list[int] = []
    with Feed(started.append, range(100), feeding=Feeding(num_threads=2, num_ahead=3)) as feed:
        next(feed)
        time.sleep(0.05)
        assert started == [0, 1, 2, 3]  # the one that was read, and three ahead
    time.sleep(0.02)
    assert len(started) == 4


def test_an_error_comes_in_its_turn_and_ends_the_threads():
    def build(number: int) -> int:
        if number == 2:
            raise CasemateError("dataset", "shard", "is damaged")
        return number

    before = threading.active_count()
    seen: list[int] = []
    with (
        pytest.raises(CasemateError, match="is damaged"),
        Feed(build, range(9), feeding=Feeding(num_ahead=5)) as feed,
    ):
        seen.extend(feed)
    assert seen == [0, 1]
    assert threading.active_count() == before


def test_a_reader_that_stops_early_leaves_no_thread_and_no_work_behind():
    before = threading.active_count()
    running = threading.Event()

    def build(number: int) -> int:
        running.set()
        time.sleep(0.02)
        return number

    def read_one() -> int:
        with Feed(build, range(10**9), feeding=Feeding()) as feed:
            return next(feed)

    assert read_one() == 0
    assert running.is_set()
    assert threading.active_count() == before


def test_waiting_is_measured_and_work_meanwhile_is_not():
    finished: list[int] = []

    def build(number: int) -> int:
        time.sleep(0.02)
        finished.append(number)
        return number

    with Feed(build, range(8), feeding=Feeding()) as feed:
        assert list(feed) == list(range(8))
    assert feed.wait_seconds >= 0.15  # nothing to do but wait
    finished.clear()
    began = time.perf_counter()
    with Feed(build, range(8), feeding=Feeding(num_ahead=2)) as feed:
        for number in feed:
            while len(finished) < min(8, number + 3):  # a step that outlasts the building
                time.sleep(0.002)
    assert feed.wait_seconds < (time.perf_counter() - began) / 2  # the first part only
