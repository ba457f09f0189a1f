"""Splits: stratified, deterministic, blind to listing order, faithful to native splits."""

import random
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.core.errors import CasemateError
from components.data.sources.base import Entry
from components.data.splits import SPLITS, assign_splits, stratified_subset


def listing(sizes, hint=None, prefix="x"):
    """`sizes[c]` entries of every class c."""
    return [
        Entry(f"{prefix}-{label}-{i:04d}", label, hint, str(i))
        for label, size in enumerate(sizes)
        for i in range(size)
    ]


def assign(entries, num_classes, **changes):
    settings = {"seed": 7, "val_fraction": 0.1, "test_fraction": 0.2, "limits": {}, **changes}
    return assign_splits(entries, classes=[str(c) for c in range(num_classes)], **settings)


class_sizes = st.lists(st.integers(3, 60), min_size=1, max_size=5)
percents = st.integers(0, 25)  # at least one item of three is left to train on


def is_empty(sizes, percent):
    """Whether every class rounds its share down to nothing."""
    return percent > 0 and all(Fraction(percent, 100) * size < Fraction(1, 2) for size in sizes)


@given(sizes=class_sizes, val=percents, test=percents, seed=st.integers(0, 99))
def test_shares_are_exact_per_class_and_order_of_listing_is_irrelevant(sizes, val, test, seed):
    entries = listing(sizes)
    settings = {"val_fraction": val / 100, "test_fraction": test / 100, "seed": seed}
    if is_empty(sizes, val) or is_empty(sizes, test):
        with pytest.raises(CasemateError, match="split empty"):
            assign(entries, len(sizes), **settings)
        return
    splits = assign(entries, len(sizes), **settings)
    assert sorted(e.item_id for s in SPLITS for e in splits[s]) == sorted(
        e.item_id for e in entries
    )
    for split, percent in (("val", val), ("test", test)):
        counts = Counter(entry.label for entry in splits[split])
        for label, size in enumerate(sizes):
            assert abs(counts[label] - Fraction(percent, 100) * size) <= Fraction(1, 2)
    random.Random(seed).shuffle(entries)
    assert assign(entries, len(sizes), **settings) == splits


def test_fractions_mean_what_was_written():
    """0.29 * 50 is 14.499... in doubles; 29/100 of 50 is 14.5 and rounds up."""
    splits = assign(listing([50]), 1, val_fraction=0.29, test_fraction=0.0)
    assert len(splits["val"]) == 15


def test_seed_moves_items_and_nothing_else_does():
    entries = listing([40, 40])
    assert assign(entries, 2) == assign(entries, 2)
    first, second = (assign(entries, 2, seed=seed)["test"] for seed in (1, 2))
    assert {e.item_id for e in first} != {e.item_id for e in second}


def test_an_added_item_leaves_the_order_of_the_others_alone():
    entries = listing([30, 30])
    before = [e.item_id for e in assign(entries, 2, val_fraction=0, test_fraction=0)["train"]]
    extra = Entry("new", 0, None, "new")
    after = assign([extra, *entries], 2, val_fraction=0, test_fraction=0)["train"]
    assert [e.item_id for e in after if e.item_id != "new"] == before


def test_stored_order_is_a_shuffle_so_prefixes_are_fair():
    splits = assign(listing([200, 200]), 2, val_fraction=0, test_fraction=0)
    counts = Counter(entry.label for entry in splits["train"][:100])
    assert 30 <= counts[0] <= 70  # hypergeometric: standard deviation 4.3, so 4.6 of them


def test_native_test_split_is_kept_and_val_comes_from_train():
    train, test = listing([20, 20], "train", "a"), listing([5, 6], "test", "b")
    splits = assign([*train, *test], 2, val_fraction=0.25, test_fraction=0.2)
    assert {e.item_id for e in splits["test"]} == {e.item_id for e in test}
    assert Counter(e.label for e in splits["val"]) == {0: 5, 1: 5}
    assert all(e.split_hint == "train" for e in [*splits["val"], *splits["train"]])


def test_native_val_split_is_kept_and_test_is_carved():
    train, val = listing([20, 20], "train", "a"), listing([3, 3], "val", "b")
    splits = assign([*train, *val], 2)
    assert {e.item_id for e in splits["val"]} == {e.item_id for e in val}
    assert Counter(e.label for e in splits["test"]) == {0: 4, 1: 4}


@given(sizes=class_sizes, share=st.integers(1, 99), seed=st.integers(0, 9))
def test_limits_keep_the_classes_in_proportion(sizes, share, seed):
    entries = listing(sizes)
    limit = max(1, len(entries) * share // 100)
    chosen = stratified_subset(entries, limit=limit, stream="train", seed=seed)
    assert len(chosen) == len({e.item_id for e in chosen}) == limit
    counts = Counter(entry.label for entry in chosen)
    for label, size in enumerate(sizes):
        assert abs(counts[label] - Fraction(limit * size, len(entries))) < 1


def test_many_rare_classes_do_not_lose_to_a_large_one():
    chosen = stratified_subset(listing([50, *[1] * 50]), limit=40, stream="val", seed=0)
    assert Counter(e.label for e in chosen)[0] == 20


def test_limits_per_split_and_limits_beyond_the_split():
    splits = assign(listing([50, 50]), 2, limits={"train": 10, "test": 10_000})
    assert {split: len(splits[split]) for split in SPLITS} == {"train": 10, "val": 10, "test": 20}
    assert Counter(e.label for e in splits["train"]) == {0: 5, 1: 5}


def test_class_without_training_item_is_named():
    with pytest.raises(CasemateError, match="class 2 has no training item"):
        assign(listing([10, 10]), 3)
    with pytest.raises(CasemateError, match=r"raise data\.limits\.train"):
        assign(listing([10, 10, 10]), 3, limits={"train": 2})


def test_a_fraction_that_leaves_its_split_empty_is_named_with_the_counts():
    with pytest.raises(CasemateError) as caught:
        assign(listing([4, 4]), 2)
    assert str(caught.value).startswith(
        "data.val_fraction: 0.1 leaves the val split empty: 8 images in 2 classes"
    )
    with pytest.raises(CasemateError, match=r"data\.test_fraction: 0\.05 leaves the test split"):
        assign([*listing([9, 9]), *listing([2, 2], "val", "v")], 2, test_fraction=0.05)
    native = [*listing([4, 4]), *listing([1, 1], "val", "v"), *listing([1, 1], "test", "t")]
    assert len(assign(native, 2)["train"]) == 8  # nothing is carved, so nothing is missing


def test_sources_for_evaluation_alone_need_no_training_item():
    splits = assign(listing([4, 0, 3], hint="test"), 3, test_only=True)
    assert {split: len(splits[split]) for split in SPLITS} == {"train": 0, "val": 0, "test": 7}
    with pytest.raises(CasemateError, match="class 0 has no training item"):
        assign(listing([4, 0, 3], hint="test"), 3)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"val_fraction": 1.0}, "data.val_fraction"),
        ({"test_fraction": -0.1}, "data.test_fraction"),
        ({"val_fraction": 0.5, "test_fraction": 0.5}, "data.val_fraction"),
        ({"limits": {"dev": 5}}, "data.limits.dev"),
        ({"limits": {"val": 0}}, "data.limits.val"),
    ],
)
def test_bad_settings_are_named(changes, key):
    with pytest.raises(CasemateError) as caught:
        assign(listing([10, 10]), 2, **changes)
    assert caught.value.key == key


def test_a_limit_leaves_each_class_a_training_item():
    """3 of 1,003 give no item of 20 by their share; the largest class gives one away."""
    entries = listing([500, 500, 3], hint="train") + listing([5, 5, 5], hint="test", prefix="t")
    plain = stratified_subset(entries[:1003], limit=20, stream="train", seed=7)
    assert {entry.label for entry in plain} == {0, 1}
    limits = {"train": 20, "test": 2}
    splits = assign(entries, 3, limits=limits, val_fraction=0.0)
    counts = Counter(entry.label for entry in splits["train"])
    assert sum(counts.values()) == 20
    assert counts[2] == 1
    kept = {entry.item_id for entry in splits["train"] if entry.label != 2}
    assert kept < {entry.item_id for entry in plain}
    assert len(splits["test"]) == 2  # test items are taken by their shares alone


def test_a_limit_that_leaves_each_class_an_item_is_unchanged():
    entries = listing([50, 40, 30])
    splits = assign(entries, 3, limits={"train": 12}, val_fraction=0.0, test_fraction=0.0)
    plain = stratified_subset(entries, limit=12, stream="train", seed=7)
    assert {e.item_id for e in splits["train"]} == {e.item_id for e in plain}
