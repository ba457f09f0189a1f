"""Subsets: the hash order by hand, shares of classes, and lists of the user's own."""

import hashlib
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.core.errors import CasemateError
from components.core.settings import SettingError
from components.evaluate.settings import SubsetSettings
from components.evaluate.subsets import choose_items, seeded_order, stratified

IDS = [f"val-{number:03d}" for number in range(50)]
LABELS = [number % 3 for number in range(50)]


def chosen(ids=IDS, labels=LABELS, seed=7, **how):
    return choose_items(ids, labels, SubsetSettings(**how), seed=seed)


def test_order_is_that_of_the_hash():
    expected = sorted(IDS, key=lambda i: hashlib.blake2b(f"7|{i}".encode()).hexdigest())
    assert seeded_order(IDS, seed=7) == expected
    assert chosen(num_items=10) == expected[:10]
    assert chosen() == expected
    assert chosen(num_items=1000) == expected
    assert chosen(num_items=10, seed=8) != expected[:10]


def test_known_items():
    """`printf '0|a' | b2sum` and so on, sorted."""
    assert seeded_order(["a", "b", "c", "d", "e"], seed=0) == ["d", "e", "c", "b", "a"]


def test_subsets_do_not_depend_on_the_order_of_the_data():
    mixed = list(zip(IDS, LABELS, strict=True))
    random.Random(0).shuffle(mixed)
    ids, labels = zip(*mixed, strict=True)
    for by_class in (False, True):
        how = {"num_items": 11, "by_class": by_class}
        assert chosen(ids, labels, **how) == chosen(**how)
    assert set(chosen(num_items=5)) < set(chosen(num_items=6))


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=40).flatmap(
        lambda labels: st.tuples(st.just(labels), st.integers(1, len(labels)))
    )
)
def test_classes_keep_their_shares(case):
    labels, num_items = case
    ids = [str(number) for number in range(len(labels))]
    found = stratified(ids, labels, num_items=num_items, seed=1)
    assert len(set(found)) == len(found) == num_items
    counts = Counter(labels[int(item_id)] for item_id in found)
    for label, total in Counter(labels).items():
        assert abs(counts[label] - num_items * total / len(labels)) < 1
        own = seeded_order([i for i in ids if labels[int(i)] == label], seed=1)
        assert {i for i in found if labels[int(i)] == label} == set(own[: counts[label]])


def test_largest_remainders_get_the_rest():
    """Shares 2.0, 1.2 and 0.8 of four items."""
    labels = [0] * 5 + [1] * 3 + [2] * 2
    found = stratified(IDS[:10], labels, num_items=4, seed=3)
    assert Counter(labels[IDS.index(i)] for i in found) == {0: 2, 1: 1, 2: 1}


def test_equal_classes_get_equal_counts():
    found = stratified(IDS[:48], LABELS[:48], num_items=12, seed=3)
    assert Counter(LABELS[IDS.index(i)] for i in found) == {0: 4, 1: 4, 2: 4}


def test_a_list_overrides_and_is_checked():
    assert chosen(item_ids=("val-003", "val-001")) == ["val-003", "val-001"]
    with pytest.raises(CasemateError, match=r"item_ids: x is not an item .*2 such ids"):
        chosen(item_ids=("val-003", "x", "y"))
    with pytest.raises(CasemateError, match="name an item twice"):
        chosen(item_ids=("val-003", "val-003"))
    with pytest.raises(SettingError, match="leave nothing else to choose"):
        SubsetSettings(item_ids=("a",), num_items=3)
    with pytest.raises(SettingError, match="does nothing without num_items"):
        SubsetSettings(by_class=True)
    with pytest.raises(ValueError, match="an item occurs twice"):
        chosen(ids=["a", "a"], labels=[0, 0])
