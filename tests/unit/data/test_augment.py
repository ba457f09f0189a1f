"""Augmentation as a whole: each item's change is its own, in every combination, in any thread."""

import hashlib
import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.core.errors import CasemateError
from components.core.settings import SettingError
from components.data.augment import Augmentation, Mixing
from components.data.augment.draws import Draws
from components.data.settings import AugmentSettings

SIDE = 12
PAD = Augmentation(size=SIDE, crop="pad", pad=2, flip=True)
HEAVY = Augmentation(
    size=SIDE,
    crop="resized",
    flip=True,
    rand_augment="rand-m9-mstd0.5-inc1",
    jitter=0.4,
    rotation=10,
    erase_prob=0.5,
)


def make_batch(num_items: int, *, channels: int = 3, side: int = SIDE):
    shape = (num_items, channels, side, side)
    images = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0))
    return images.to(torch.uint8), [f"item-{i}" for i in range(num_items)]


def digest(images: torch.Tensor) -> str:
    return hashlib.sha256(images.contiguous().numpy().tobytes()).hexdigest()


# -- draws


def test_words_are_uniform_and_pinned():
    draws = Draws(tuple(f"item-{i}" for i in range(5000)), 0, 0).words()
    counts = torch.stack([torch.bincount(draws[:, column] % 9, minlength=9) for column in (0, 1)])
    assert (counts - 5000 / 9).abs().max() < 111  # mean 556, standard deviation 22: 5 of them
    # pinned: trainings of different versions must see the same crops
    assert draws[0].tolist() == [644925305, 1088440646, 3889594018]


def test_uniforms_are_uniform_independent_and_pinned():
    table = Draws(tuple(f"item-{i}" for i in range(4000)), 0, 0).uniforms("test", 6)
    assert table.min() > 0
    assert table.max() < 1
    ranks = np.abs(np.sort(table, axis=0) - np.linspace(0, 1, 4000)[:, None]).max()
    assert ranks < 0.035  # Kolmogorov-Smirnov: beyond it with probability 6e-5 per column
    correlations = np.corrcoef(table.T) - np.eye(6)
    assert np.abs(correlations).max() < 5 / 4000**0.5
    assert table[0, :2].tolist() == [0.15321291240568968, 0.2701886688149021]


@pytest.mark.parametrize("other", [Draws(("a",), 1, 0), Draws(("a",), 0, 1), Draws(("b",), 0, 0)])
def test_every_part_of_the_address_matters(other):
    draws = Draws(("a",), 0, 0)
    assert not torch.equal(draws.words(), other.words())
    assert not np.array_equal(draws.uniforms("s", 3), other.uniforms("s", 3))
    assert not np.array_equal(draws.uniforms("s", 3), draws.uniforms("t", 3))
    seeds = {d.generator(s, 0).initial_seed() for d in (draws, other) for s in "st"}
    assert len(seeds) == 4


# -- pad, crop and flip


def test_every_pad_crop_is_one_allowed_crop_or_mirror():
    images, ids = make_batch(60, channels=2, side=6)
    result = Augmentation(size=6, crop="pad", pad=2, flip=True).apply(
        images, ids, run_seed=3, epoch=1
    )
    found = set()
    for image, changed in zip(images.numpy(), (result * 255).round().numpy(), strict=True):
        framed = np.pad(image, ((0, 0), (2, 2), (2, 2)))
        matches = [
            (top, left, mirrored)
            for top, left, mirrored in itertools.product(range(5), range(5), (False, True))
            if np.array_equal(
                framed[:, top : top + 6, left : left + 6][:, :, :: -1 if mirrored else 1], changed
            )
        ]
        assert len(matches) == 1
        found.add(matches[0])
    assert {top for top, _, _ in found} == {left for _, left, _ in found} == set(range(5))
    assert {mirrored for _, _, mirrored in found} == {False, True}
    assert len({(top, left) for top, left, _ in found}) > 10  # both axes move, each on its own


def test_pad_crop_and_flip_are_pinned():
    """Figures of earlier versions depend on these bytes."""
    images, ids = make_batch(16)
    assert digest(PAD.apply(images, ids, run_seed=3, epoch=1)) == (
        "d9a09beeadca6fab0b91e459a60883ecdb6c2ba7eb4ded2bd3d9bd502d8a8c3b"
    )


def test_the_default_is_the_stored_image():
    images, ids = make_batch(4)
    result = Augmentation(size=SIDE).apply(images, ids, run_seed=0, epoch=0)
    assert torch.equal(result, images.to(torch.float32) / 255)
    assert result.dtype == torch.float32


# -- whose randomness


@settings(max_examples=10, deadline=None)
@given(rows=st.permutations(range(8)), kept=st.integers(1, 8))
@pytest.mark.parametrize("augmentation", [PAD, HEAVY], ids=["pad", "heavy"])
def test_batch_and_order_do_not_matter(augmentation, rows, kept):
    images, ids = make_batch(8)
    whole = augmentation.apply(images, ids, run_seed=3, epoch=1)
    rows = rows[:kept]
    part = augmentation.apply(images[rows], [ids[i] for i in rows], run_seed=3, epoch=1)
    assert torch.equal(part, whole[rows])


@pytest.mark.parametrize("augmentation", [PAD, HEAVY], ids=["pad", "heavy"])
def test_epoch_seed_and_copy_change_the_result(augmentation):
    images, ids = make_batch(8)
    results = [
        augmentation.apply(images, ids, run_seed=3, epoch=1),
        augmentation.apply(images, ids, run_seed=4, epoch=1),
        augmentation.apply(images, ids, run_seed=3, epoch=2),
        augmentation.apply(images, ids, run_seed=3, epoch=1, repeats=[1] * 8),
        augmentation.apply(images, ids, run_seed=3, epoch=1, repeats=[2] * 8),
    ]
    assert len({digest(result) for result in results}) == 5
    first = augmentation.apply(images, ids, run_seed=3, epoch=1, repeats=[0] * 8)
    assert torch.equal(first, results[0])


def test_no_shared_generator_is_used_or_moved():
    images, ids = make_batch(8)
    expected = HEAVY.apply(images, ids, run_seed=3, epoch=1)
    random.seed(99)
    np.random.seed(99)  # noqa: NPY002 - the generator that libraries share
    torch.manual_seed(99)
    before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    state = torch.get_rng_state()
    assert torch.equal(HEAVY.apply(images, ids, run_seed=3, epoch=1), expected)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), state)


def test_threads_do_not_disturb_each_other():
    images, ids = make_batch(24)
    whole = HEAVY.apply(images, ids, run_seed=3, epoch=1)

    def part(rows: slice) -> torch.Tensor:
        return HEAVY.apply(images[rows], ids[rows], run_seed=3, epoch=1)

    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(part, [slice(i, i + 2) for i in range(0, 24, 2)]))
    assert torch.equal(torch.cat(parts), whole)


def test_input_is_left_alone():
    images, ids = make_batch(8)
    before = images.clone()
    for augmentation in (
        PAD,
        HEAVY,
        Augmentation(size=SIDE, rand_augment="rand-m9", erase_prob=1.0),
    ):
        augmentation.apply(images, ids, run_seed=3, epoch=1)
        assert torch.equal(images, before)


# -- combinations


@pytest.mark.parametrize("channels", [1, 3])
def test_all_sixteen_combinations_differ_and_stay_in_range(channels):
    images, ids = make_batch(24, channels=channels, side=16)  # 12 pairs: both kinds of mixing
    labels = torch.arange(24) % 5
    basic = Augmentation(size=SIDE, crop="resized", flip=True)
    seen = set()
    for mixup, cutmix, rand, erasing in itertools.product((False, True), repeat=4):
        chosen = replace(
            basic, rand_augment="rand-m9-mstd0.5-inc1" if rand else None, erase_prob=erasing * 0.5
        )
        result = chosen.apply(images, ids, run_seed=3, epoch=1)
        if mixup or cutmix:
            mixing = Mixing(
                AugmentSettings(mixup=0.8 * mixup, cutmix=1.0 * cutmix, mix_mode="pair")
            )
            place = {"run_seed": 3, "epoch": 1, "step": 0, "item_ids": ids}
            result, targets = mixing.apply(result, labels, num_classes=5, smoothing=0.1, **place)
            assert torch.allclose(targets.sum(dim=1), torch.ones(24))
        assert result.shape == (24, channels, SIDE, SIDE)
        assert result.dtype == torch.float32
        assert 0 <= result.min() < result.max() <= 1
        seen.add(digest(result))
    assert len(seen) == 16


def test_switching_a_part_on_leaves_the_draws_of_the_others():
    images, ids = make_batch(20)
    plain = PAD.apply(images, ids, run_seed=3, epoch=1)
    erased = replace(PAD, erase_prob=0.5).apply(images, ids, run_seed=3, epoch=1)
    changed = (plain != erased).flatten(1).any(dim=1)
    assert 3 < changed.sum() < 17  # binomial(20, 1/2): outside with probability 0.003
    inside = (plain != erased)[changed].flatten(1).float().mean(dim=1)
    assert inside.max() < 0.5  # the rest of each erased image is the same crop


# -- copies of which the first is clean


def test_first_copies_are_only_framed_and_all_copies_share_the_framing():
    images, ids = make_batch(6, side=16)
    split = replace(HEAVY, clean_copy=True, copies=3, rotation=0, jitter=0, rand_augment=None)
    framed = Augmentation(size=SIDE, crop="resized", flip=True).apply(
        images, ids, run_seed=3, epoch=1
    )
    copies = [split.apply(images, ids, run_seed=3, epoch=1, repeats=[k] * 6) for k in range(3)]
    assert torch.equal(copies[0], framed)
    untouched = [(copy == framed).flatten(1).float().mean(dim=1) for copy in copies[1:]]
    assert all((share > 0.5).all() for share in untouched)  # erasing takes at most a third
    assert len({digest(copy) for copy in copies}) == 3
    mixed = split.apply(images, ids, run_seed=3, epoch=1, repeats=[0, 1, 2, 0, 1, 2])
    expected = [copies[copy][row] for row, copy in enumerate([0, 1, 2, 0, 1, 2])]
    assert torch.equal(mixed, torch.stack(expected))


# -- mistakes


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"size": 0}, "size: 0 must be at least 1"),
        ({"crop": "random"}, "crop: random is unknown; choose one of none, pad, resized"),
        ({"crop": "pad"}, "pad: 0 must be positive with crop: pad"),
        ({"pad": 4}, "pad: 4 must be positive with crop: pad"),
        ({"scale": (1.0, 0.5)}, "scale: "),
        ({"ratio": (0.0, 1.0)}, "ratio: "),
        ({"interpolation": "nearest"}, "interpolation: nearest"),
        ({"jitter": -0.1}, "jitter: -0.1"),
        ({"rotation": 270}, "rotation: 270"),
        ({"erase_prob": 1.5}, "erase_prob: 1.5"),
        ({"erase_area": (0.5, 2.0)}, "erase_area: "),
        ({"erase_area": (0.5, 0.2)}, "erase_area: .* small and large"),
        ({"fill": (1, 2)}, "fill: .* one value or three"),
        ({"rand_augment": "rand-m9.5"}, "rand-m9.5 is not a RandAugment setting"),
        ({"rand_augment": "augmix-m3"}, "is not a RandAugment setting"),
        ({"rand_augment": "rand-m9-tnone"}, "is not a RandAugment setting"),
        ({"rand_augment": "rand-n16-tweights"}, "has 16 operations; write n1 to n15"),
        ({"rand_augment": "rand-n15-t3aw"}, "has 15 operations; write n1 to n14"),
        ({"rand_augment": "rand-n2-n0"}, "has 0 operations"),
    ],
)
def test_wrong_settings_name_their_key(wrong, message):
    with pytest.raises((SettingError, CasemateError), match=message):
        Augmentation(**{"size": SIDE, **wrong})


def test_a_crop_that_cannot_reach_the_size_is_refused():
    images, ids = make_batch(2, side=16)
    with pytest.raises(CasemateError, match=r"keeps the stored 16x16 pixels, but size is 12"):
        PAD.apply(images, ids, run_seed=0, epoch=0)


def test_wrong_calls_are_refused():
    images, ids = make_batch(3)
    with pytest.raises(ValueError, match="2 item ids for 3 images"):
        PAD.apply(images, ids[:2], run_seed=0, epoch=0)
    with pytest.raises(ValueError, match="1 repeats for 3 images"):
        PAD.apply(images, ids, run_seed=0, epoch=0, repeats=[1])
    with pytest.raises(ValueError, match="not uint8"):
        PAD.apply(images / 255, ids, run_seed=0, epoch=0)
    with pytest.raises(ValueError, match="clean_copy needs"):
        replace(PAD, clean_copy=True, copies=2).apply(images, ids, run_seed=0, epoch=0)
    with pytest.raises(ValueError, match="1 or 3 channels, not 2"):
        HEAVY.apply(images[:, :2], ids, run_seed=0, epoch=0)
    with pytest.raises(CasemateError, match=r"train\.augmentation\.fill.* 1 channel"):
        replace(HEAVY, fill=(1, 2, 3)).apply(images[:, :1], ids, run_seed=0, epoch=0)


@pytest.mark.parametrize("setting", ["rand-n15-tweights", "rand-n14-t3aw", "rand-n20-t3a"])
def test_as_many_operations_as_can_be_drawn_work(setting):
    images, ids = make_batch(2)
    augmented = Augmentation(size=SIDE, rand_augment=setting).apply(
        images, ids, run_seed=0, epoch=0
    )
    assert augmented.shape == (2, 3, SIDE, SIDE)


@pytest.mark.parametrize("augmentation", [PAD, HEAVY], ids=["pad", "heavy"])
def test_an_empty_batch_stays_empty(augmentation):
    images, _ = make_batch(0)
    assert augmentation.apply(images, [], run_seed=0, epoch=0).shape == (0, 3, SIDE, SIDE)
