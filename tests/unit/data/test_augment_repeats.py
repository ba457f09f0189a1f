"""Repeated augmentation: counts and copies as the published samplers have them."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from timm.data.distributed_sampler import RepeatAugSampler

from components.core.errors import CasemateError
from components.data.augment.repeats import copy_names, repeat_augment_indices, split_indices


def permutation(num_items: int, *, seed: int = 0) -> torch.Tensor:
    return torch.randperm(num_items, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("num_items", "workers"), [(24, 1), (24, 4), (96, 3), (100, 2)])
def test_an_epoch_holds_the_samples_of_timms_sampler(num_items, workers):
    samplers = [
        RepeatAugSampler(range(num_items), workers, rank, num_repeats=3, selected_round=0)
        for rank in range(workers)
    ]
    for sampler in samplers:
        sampler.set_epoch(5)  # its seed
    expected = Counter(index for sampler in samplers for index in sampler)
    items, _ = repeat_augment_indices(permutation(num_items, seed=5), num_repeats=3, batch_size=8)
    assert Counter(items.tolist()) == expected


@given(num_items=st.integers(1, 60), num_repeats=st.integers(1, 4), batch_size=st.integers(1, 20))
def test_copies_are_numbered_and_share_their_batch(num_items, num_repeats, batch_size):
    order = permutation(num_items)
    items, copies = repeat_augment_indices(order, num_repeats=num_repeats, batch_size=batch_size)
    assert len(items) == len(copies) == num_items
    samples = list(zip(items.tolist(), copies.tolist(), strict=True))
    assert len(set(samples)) == num_items  # no copy twice
    expected = [(int(order[i // num_repeats]), i % num_repeats) for i in range(num_items)]
    for start in range(0, num_items, batch_size):  # a batch keeps its samples, in another order
        batch = slice(start, start + batch_size)
        assert sorted(samples[batch]) == sorted(expected[batch])
        assert copies[batch].tolist() == sorted(copies[batch].tolist())


@given(num_items=st.integers(24, 60), batch_size=st.sampled_from([6, 8, 10, 12, 24]))
def test_mixed_pairs_hold_different_items(num_items, batch_size):
    items, _ = repeat_augment_indices(permutation(num_items), num_repeats=3, batch_size=batch_size)
    for start in range(0, num_items - batch_size + 1, batch_size):  # whole batches
        batch = items[start : start + batch_size]
        assert (batch[::2] != batch[1::2]).all()


def test_splits_hold_every_copy_in_blocks():
    order = permutation(10)
    items, copies = split_indices(order, num_splits=3, batch_size=12)
    assert copies.tolist() == [*[0] * 4, *[1] * 4, *[2] * 4] * 2 + [0, 0, 1, 1, 2, 2]
    assert items[:12].tolist() == order[:4].tolist() * 3
    pairs = set(zip(items.tolist(), copies.tolist(), strict=True))
    assert pairs == {(item, copy) for item in range(10) for copy in range(3)}
    assert len(items) == 30


def test_names_of_first_copies_are_their_items():
    assert copy_names(["a", "b"], None) == ("a", "b")
    assert copy_names(["a", "a", "a"], [0, 1, 2]) == ("a", "a#copy1", "a#copy2")


def test_mistakes_name_their_key():
    with pytest.raises(CasemateError, match=r"train\.batch_size: 8 is not a multiple of 3"):
        split_indices(permutation(9), num_splits=3, batch_size=8)
    with pytest.raises(CasemateError, match="must be at least 1"):
        repeat_augment_indices(permutation(9), num_repeats=0, batch_size=3)
