"""Augmentation: each item's change is its own, and is one of the allowed crops and flips."""

import numpy as np
import pytest
import torch

from components.data.augmentation import augment_batch, item_draws


def batch(num_items: int, *, height: int = 6, width: int = 5):
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(num_items, 2, height, width, generator=generator) + 0.01
    return images, [f"item-{i}" for i in range(num_items)]


SETTINGS = {"run_seed": 3, "epoch": 1, "pad_crop": 2, "flip": True}


def test_every_result_is_one_allowed_crop_or_mirror():
    images, ids = batch(40)
    result = augment_batch(images, ids, **SETTINGS)
    found = set()
    for image, changed in zip(images.numpy(), result.numpy(), strict=True):
        framed = np.pad(image, ((0, 0), (2, 2), (2, 2)))
        matches = [
            (top, left, mirrored)
            for top in range(5)
            for left in range(5)
            for mirrored in (False, True)
            if np.array_equal(
                framed[:, top : top + 6, left : left + 5][:, :, :: -1 if mirrored else 1], changed
            )
        ]
        assert len(matches) == 1
        found.add(matches[0])
    assert {top for top, _, _ in found} == {left for _, left, _ in found} == set(range(5))
    assert {mirrored for _, _, mirrored in found} == {False, True}
    assert len({(top, left) for top, left, _ in found}) > 10  # both axes move, each on its own


def test_batch_and_order_do_not_matter():
    images, ids = batch(10)
    whole = augment_batch(images, ids, **SETTINGS)
    order = [7, 2, 9]
    part = augment_batch(images[order], [ids[i] for i in order], **SETTINGS)
    assert torch.equal(part, whole[order])


@pytest.mark.parametrize("change", [{"epoch": 2}, {"run_seed": 4}])
def test_epoch_and_seed_change_the_draws(change):
    images, ids = batch(10)
    first = augment_batch(images, ids, **SETTINGS)
    assert not torch.equal(first, augment_batch(images, ids, **{**SETTINGS, **change}))


def test_each_part_can_be_switched_off():
    images, ids = batch(30)
    off = {"run_seed": 3, "epoch": 1}
    assert torch.equal(augment_batch(images, ids, pad_crop=0, flip=False, **off), images)
    flipped = augment_batch(images, ids, pad_crop=0, flip=True, **off)
    mirrored = [torch.equal(a, b.flip(-1)) for a, b in zip(flipped, images, strict=True)]
    same = [torch.equal(a, b) for a, b in zip(flipped, images, strict=True)]
    assert all(a != b for a, b in zip(mirrored, same, strict=True))
    assert 5 < sum(mirrored) < 25  # binomial(30, 1/2): outside with probability 6e-5


def test_input_is_left_alone():
    images, ids = batch(5)
    before = images.clone()
    augment_batch(images, ids, **SETTINGS)
    assert torch.equal(images, before)


def test_draws_are_uniform_and_pinned():
    ids = [f"item-{i}" for i in range(5000)]
    draws = item_draws(ids, run_seed=0, epoch=0)
    counts = torch.stack([torch.bincount(draws[:, column] % 9, minlength=9) for column in (0, 1)])
    # mean 556, standard deviation 22: 5 of them
    assert (counts - 5000 / 9).abs().max() < 111
    # pinned: trainings of different versions must see the same crops
    assert item_draws(["item-0"], run_seed=0, epoch=0).tolist() == [
        [644925305, 1088440646, 3889594018]
    ]


def test_wrong_calls_are_refused():
    images, ids = batch(3)
    with pytest.raises(ValueError, match="2 item ids for 3 images"):
        augment_batch(images, ids[:2], **SETTINGS)
    with pytest.raises(ValueError, match="pad_crop"):
        augment_batch(images, ids, **{**SETTINGS, "pad_crop": -1})
    assert augment_batch(images[:0], [], **SETTINGS).shape == (0, 2, 6, 5)
