"""Images made on the spot: the same everywhere, different between items, learnable by class."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.core.errors import CasemateError
from components.data.sources import open_source
from components.data.splits import assign_splits


def made(**options):
    return open_source("made", path=None, options=options)


@given(
    classes=st.integers(2, 12),
    size=st.integers(1, 20),
    channels=st.sampled_from([1, 3]),
    more=st.integers(0, 9),
)
def test_counts_labels_and_shapes_are_as_asked(classes, size, channels, more):
    source = made(
        classes=classes, image_size=size, channels=channels, train=classes + more, val=3, test=4
    )
    entries = source.entries()
    assert Counter(e.split_hint for e in entries) == {"train": classes + more, "val": 3, "test": 4}
    assert len({e.item_id for e in entries}) == len(entries)
    per_class = Counter(e.label for e in entries if e.split_hint == "train")
    assert per_class.keys() == set(range(len(source.classes)))
    assert max(per_class.values()) - min(per_class.values()) <= 1
    pixels = source.decode(entries[-1])
    assert (pixels.shape, pixels.dtype) == ((size, size, channels), np.uint8)


def test_pixels_follow_from_seed_and_item_alone():
    entries = made().entries()
    first = [made().decode(entry) for entry in entries]
    again = [made(train=400, test=7).decode(entry) for entry in reversed(entries)]
    np.testing.assert_array_equal(first, again[::-1])
    assert len({pixels.tobytes() for pixels in first}) == len(entries)
    other = made(seed=1)
    assert not any(np.array_equal(other.decode(e), p) for e, p in zip(entries, first, strict=True))


@pytest.mark.parametrize("channels", [1, 3])
def test_a_class_can_be_learnt_from_few_items(channels):
    """The nearest mean of the training images names the class, also of another seed's items."""
    source = made(channels=channels, image_size=16)
    entries = source.entries()
    train = [e for e in entries if e.split_hint == "train"]
    images = np.array([source.decode(e) for e in train], dtype=float)
    labels = np.array([e.label for e in train])
    means = np.array([images[labels == label].mean(axis=0) for label in range(10)])
    fresh = made(channels=channels, image_size=16, seed=5)
    tested = [e for e in entries if e.split_hint == "test"]
    far = [((means - fresh.decode(e)) ** 2).sum(axis=(1, 2, 3)) for e in tested]
    right = np.mean(np.argmin(far, axis=1) == [e.label for e in tested])
    assert right > 0.9


def test_its_splits_are_its_own():
    source = made()
    splits = assign_splits(
        source.entries(), classes=source.classes, seed=0, val_fraction=0.3, test_fraction=0.3,
        limits={"train": 30},
    )  # fmt: skip
    assert {split: len(entries) for split, entries in splits.items()} == {
        "train": 30,
        "val": 20,
        "test": 20,
    }
    assert "nothing about a real dataset" in source.remarks["made"]


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("classes", 1, "must be at least 2"),
        ("train", 9, "must be at least 10"),
        ("val", 0, "must be at least 1"),
        ("channels", 2, "is neither 1 nor 3"),
        ("image_size", 0, "must be at least 1"),
        ("seed", -1, "must be at least 0"),
    ],
)
def test_what_cannot_be_made_is_named(name, value, remedy):
    with pytest.raises(CasemateError) as caught:
        made(**{name: value})
    assert str(caught.value) == f"data.options.{name}: {value} {remedy}"
