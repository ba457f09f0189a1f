"""Double masking: masks that cover every patch, inference, and claims no patch can refute."""

from itertools import combinations_with_replacement, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.certify.patch.double_masking import MaskSet, certify_pairs, infer
from components.core.errors import CasemateError


@st.composite
def settings_of_masks(draw, max_side=12):
    image_size = draw(st.integers(1, max_side)), draw(st.integers(1, max_side))
    patch = tuple(draw(st.integers(1, side)) for side in image_size)
    return {"image_size": image_size, "patch": patch, "num_masks": draw(st.integers(2, 6))}


def unchecked(values):
    masks = object.__new__(MaskSet)
    for name, value in values.items():
        object.__setattr__(masks, name, value)
    return masks


def hides_all(masks):
    return not bool(masks.visible(masks.pairs()).flatten(1).any(dim=1).all())


@st.composite
def mask_sets(draw, max_side=12):
    values = draw(settings_of_masks(max_side).filter(lambda v: not hides_all(unchecked(v))))
    return MaskSet(**values)


@settings(max_examples=150, deadline=None)
@given(settings_of_masks())
def test_masks_that_leave_nothing_to_see_are_refused_and_no_others(values):
    if not hides_all(unchecked(values)):
        MaskSet(**values)
        return
    with pytest.raises(CasemateError, match=r"^certify\.mask_patch: .* can hide the whole image"):
        MaskSet(**values)


@settings(max_examples=150, deadline=None)
@given(mask_sets())
def test_some_mask_hides_every_patch_whole(masks):
    hidden, (height, width), (tall, wide) = masks.masks(), masks.image_size, masks.patch
    assert hidden.shape == (len(masks), height, width)
    assert len(masks) <= masks.num_masks**2
    for top, left in product(range(height - tall + 1), range(width - wide + 1)):
        window = hidden[:, top : top + tall, left : left + wide]
        assert window.flatten(1).all(dim=1).any()


def test_a_published_mask_set():
    # 224 pixels, a patch of 32 and 6 masks per side: 33 positions each, masks of 64 pixels.
    masks = MaskSet(image_size=(224, 224), patch=32, num_masks=6)
    assert len(masks) == 36
    assert set(masks.masks().flatten(1).sum(dim=1).tolist()) == {64 * 64}
    assert len(masks.pairs()) == 36 * 37 // 2


def test_pairs_hide_both_masks():
    masks = MaskSet(image_size=(6, 5), patch=2, num_masks=2)
    visible, hidden = masks.visible(masks.pairs()), masks.masks()
    expected = combinations_with_replacement(range(len(masks)), 2)
    for (i, j), shown, pair in zip(masks.pairs().tolist(), visible, expected, strict=True):
        assert (i, j) == pair
        assert torch.equal(shown, ~(hidden[i] | hidden[j]))


def test_smaller_patches_are_covered_and_larger_ones_are_not():
    masks = MaskSet(image_size=(8, 8), patch=(2, 3), num_masks=3)
    assert masks.covers((2, 3))
    assert masks.covers(2)
    assert not masks.covers(3)


def from_table(table):
    return lambda pairs: table[pairs[:, 0], pairs[:, 1]]


@st.composite
def attacked_tables(draw):
    """A clean table of one class, and what a patch under mask `over` can make of it."""
    size, num_classes = draw(st.integers(1, 6)), 3
    label, over = draw(st.integers(0, num_classes - 1)), draw(st.integers(0, size - 1))
    cells = draw(
        st.lists(st.integers(0, num_classes - 1), min_size=size * size, max_size=size * size)
    )
    table = np.array(cells).reshape(size, size)
    table = np.triu(table) + np.triu(table, 1).T  # masks commute
    table[over, :] = table[:, over] = label  # the patch is hidden: nothing changes
    return table, label


@settings(max_examples=150, deadline=None)
@given(attacked_tables())
def test_a_patch_changes_every_pair_it_can_reach_and_the_answer_stays(drawn):
    table, label = drawn
    assert infer(from_table(table), num_masks=len(table)) == label


def test_every_attack_on_three_masks():
    # All 3^3 tables of what the pairs without the covering mask may become, for each such mask.
    for over, label in product(range(3), range(3)):
        free = [m for m in range(3) if m != over]
        for a, b, both in product(range(3), repeat=3):
            table = np.full((3, 3), label)
            table[free[0], free[0]], table[free[1], free[1]] = a, b
            table[free[0], free[1]] = table[free[1], free[0]] = both
            assert infer(from_table(table), num_masks=3) == label


def test_real_patches_on_a_real_classifier():
    """A classifier of pixels, every position and many patterns of the patch: claims hold."""
    rng = np.random.default_rng(0)
    masks = MaskSet(image_size=(6, 6), patch=2, num_masks=3)
    weights = torch.from_numpy(rng.normal(size=(36, 3)))
    weights[:, 1] += 1.0

    def predictor(image):
        def predict(pairs):
            shown = torch.where(masks.visible(pairs), image, torch.zeros(()).double())
            return (shown.flatten(1) @ weights).argmax(dim=1).numpy()

        return predict

    images = torch.from_numpy(rng.random((30, 6, 6)))
    votes = np.stack([predictor(image)(masks.pairs()) for image in images])
    claims = certify_pairs(votes, masks, num_classes=3)
    assert 0 < claims.certified.sum() < len(images)
    changed = False
    for image, label, certified in zip(images, claims.prediction, claims.certified, strict=True):
        assert infer(predictor(image), num_masks=len(masks)) == label
        for top, left, value in product(range(0, 5, 2), range(0, 5, 2), (-50.0, 50.0)):
            attacked = image.clone()
            attacked[top : top + 2, left : left + 2] = value
            answer = infer(predictor(attacked), num_masks=len(masks))
            assert answer == label or not certified
            changed |= bool(answer != label)
    assert changed  # the attack is strong enough to tell


def test_only_needed_pairs_are_asked():
    asked = []

    def predict(pairs):
        asked.append(len(pairs))
        return np.zeros(len(pairs), dtype=np.int64)

    assert infer(predict, num_masks=9) == 0
    assert asked == [9]


def test_claims_by_hand():
    masks = MaskSet(image_size=(3, 1), patch=(1, 1), num_masks=3)  # pairs 00 01 02 11 12 22
    votes = np.array([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 1]], dtype=np.uint16)
    claims = certify_pairs(votes, masks, num_classes=2)
    # item 1: mask 0 says 1 under every second mask, so it is believed against the majority
    # item 2: mask 0 alone says 0, but not under a second mask
    assert claims.prediction.tolist() == [1, 1, 1]
    assert claims.num_agreeing.tolist() == [6, 3, 5]
    assert claims.certified.tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"patch": 9}, "certify.patch_sizes: 9 does not fit into the image, 8x8 pixels"),
        ({"patch": 0}, "certify.patch_sizes: 0 does not fit into the image, 8x8 pixels"),
        ({"num_masks": 1}, "certify.num_masks: 1 is not a number of masks per side, 2 or more"),
    ],
)
def test_impossible_masks_are_refused_in_one_line(wrong, line):
    with pytest.raises(CasemateError) as caught:
        MaskSet(**({"image_size": (8, 8), "patch": 2, "num_masks": 3} | wrong))
    assert str(caught.value) == line
