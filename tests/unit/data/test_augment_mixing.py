"""Mixing against timm's arithmetic, and its independence of how a batch is shared out."""

import numpy as np
import pytest
import timm.data.mixup
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from components.core.errors import CasemateError
from components.core.settings import SettingError
from components.data.augment import Mixing
from components.data.augment.draws import Draws
from components.data.augment.mixing import Blends, cut_boxes
from components.data.settings import AugmentSettings

ROWS, CLASSES, HEIGHT, WIDTH = 12, 5, 9, 13
IDS = tuple(f"item-{i}" for i in range(ROWS))


def mixing_of(mixup: float = 0.8, cutmix: float = 1.0, **settings) -> Mixing:
    return Mixing(AugmentSettings(mixup=mixup, cutmix=cutmix, **settings))


def make_batch(num_rows: int = ROWS):
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(num_rows, 3, HEIGHT, WIDTH, generator=generator)
    return images, torch.randint(CLASSES, (num_rows,), generator=generator)


def mix(mixing: Mixing, rows=slice(None), *, smoothing: float = 0.1, **address):
    images, labels = make_batch()
    place = {"run_seed": 3, "epoch": 1, "step": 2} | address
    return mixing.apply(
        images[rows],
        labels[rows],
        num_classes=CLASSES,
        smoothing=smoothing,
        item_ids=IDS[rows],
        **place,
    )


def names_of(mode: str, step: int) -> tuple[str, ...]:
    pairs = zip(IDS[::2], IDS[1::2], strict=True)
    return tuple(f"{step}|{a}|{b}" for a, b in pairs) if mode == "pair" else (str(step),)


@pytest.mark.parametrize("step", range(4))
@pytest.mark.parametrize("mode", ["batch", "pair"])
@pytest.mark.parametrize("alphas", [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_arithmetic_is_that_of_timm(monkeypatch, alphas, mode, step):
    mixing = mixing_of(*alphas, mix_mode=mode)
    ours, targets = mix(mixing, step=step)
    blends = mixing.draw(Draws(names_of(mode, step), 3, 1), height=HEIGHT, width=WIDTH)
    oracle = timm.data.mixup.Mixup(
        *alphas, mode=mode, label_smoothing=0.1, num_classes=CLASSES, correct_lam=True
    )
    boxes = iter(blends.box[blends.cut].tolist())
    monkeypatch.setattr(timm.data.mixup, "rand_bbox", lambda *_, **__: next(boxes))
    # a cut's own lambda is replaced by its box's: any other than 1 will do
    drawn = np.where(blends.cut, 0.5, blends.kept)
    monkeypatch.setattr(
        oracle, "_params_per_batch", lambda: (float(drawn[0]), bool(blends.cut[0])), raising=True
    )
    monkeypatch.setattr(oracle, "_params_per_elem", lambda _: (drawn.copy(), blends.cut))
    order = [*range(0, ROWS, 2), *range(ROWS - 1, 0, -2)]  # timm pairs row i with row B - 1 - i
    images, labels = make_batch()
    expected, expected_targets = oracle(images[order], labels[order])
    torch.testing.assert_close(ours[order], expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(targets[order], expected_targets.float(), atol=1e-6, rtol=0)
    assert not torch.equal(ours, images)


@given(
    kept=st.floats(0, 1),
    row=st.floats(0, 1, exclude_max=True),
    column=st.floats(0, 1, exclude_max=True),
    sides=st.tuples(st.integers(1, 40), st.integers(1, 40)),
)
def test_boxes_are_those_of_timm(kept, row, column, sides):
    height, width = sides
    centres = iter([int(row * height), int(column * width)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np.random, "randint", lambda *_, **__: next(centres))
        top, bottom, left, right = timm.data.mixup.rand_bbox((3, height, width), kept)
    ours = cut_boxes(
        np.array([kept]), np.array([row]), np.array([column]), height=height, width=width
    )
    assert ours.tolist() == [[top, bottom, left, right]]


@pytest.mark.parametrize("mode", ["batch", "pair"])
@pytest.mark.parametrize("share", [2, 4, 6])
def test_any_even_share_mixes_as_one_worker(mode, share):
    mixing = mixing_of(mix_mode=mode)
    for step in range(4):
        whole = mix(mixing, step=step)
        parts = [mix(mixing, slice(i, i + share), step=step) for i in range(0, ROWS, share)]
        for result, pieces in zip(whole, zip(*parts, strict=True), strict=True):
            assert torch.equal(torch.cat(pieces), result)


def test_cut_images_are_made_of_whole_pixels_in_the_share_that_labels_say():
    images, labels = make_batch()
    for step in range(10):
        mixed, targets = mix(mixing_of(0.0, 1.0), smoothing=0.0, step=step)
        partner = images[[row ^ 1 for row in range(ROWS)]]
        own = (mixed == images).all(dim=1)
        assert (own | (mixed == partner).all(dim=1)).all()
        share = own.flatten(1).float().mean(dim=1)
        different = labels != labels[[row ^ 1 for row in range(ROWS)]]
        assert different.any()
        weight = targets.gather(1, labels[:, None])[:, 0]
        torch.testing.assert_close(weight[different], share[different])


@pytest.mark.parametrize(("alphas", "cut"), [((0.8, 0.0), False), ((0.0, 1.0), True)])
def test_an_alpha_of_zero_switches_a_kind_off(alphas, cut):
    blends = mixing_of(*alphas).draw(Draws(IDS, 0, 0), height=32, width=32)
    assert (blends.cut == cut).all()


def test_lambda_switch_and_probability_follow_the_settings():
    draws = Draws(tuple(map(str, range(4000))), 0, 0)
    blends = mixing_of(mix_switch=0.3).draw(draws, height=8, width=8)
    assert abs(blends.cut.mean() - 0.3) < 5 * (0.21 / 4000) ** 0.5
    mixup = blends.kept[~blends.cut]
    assert stats.kstest(mixup, stats.beta(0.8, 0.8).cdf).pvalue > 1e-3
    sometimes = mixing_of(0.8, 0.0, mix_prob=0.25).draw(draws, height=8, width=8)
    assert abs((sometimes.kept != 1).mean() - 0.25) < 5 * (0.1875 / 4000) ** 0.5
    never = mix(mixing_of(mix_prob=1e-12), smoothing=0.0)
    images, labels = make_batch()
    assert torch.equal(never[0], images)
    assert torch.equal(never[1].argmax(dim=1), labels)


def test_one_lambda_per_batch_or_per_pair():
    batch = mixing_of(0.8, 0.0).draw(Draws(names_of("batch", 2), 3, 1), height=2, width=2)
    pairs = mixing_of(0.8, 0.0).draw(Draws(names_of("pair", 2), 3, 1), height=2, width=2)
    assert len(set(batch.kept)) == 1
    assert len(set(pairs.kept)) == ROWS // 2
    changed = [mix(mixing_of(), **address)[0] for address in ({}, {"step": 3}, {"epoch": 2})]
    changed.append(mix(mixing_of(), run_seed=4)[0])
    assert len({tuple(images.flatten().tolist()) for images in changed}) == 4


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.3])
def test_equal_halves_tie_exactly(monkeypatch, smoothing):
    half = Blends(np.array([0.5]), np.array([False]), np.zeros((1, 4), dtype=np.int64))
    monkeypatch.setattr(Mixing, "draw", lambda *_, **__: half)
    _, targets = mix(mixing_of(), smoothing=smoothing)
    _, labels = make_batch()
    partners = labels[[row ^ 1 for row in range(ROWS)]]
    own, other = (targets.gather(1, which[:, None]) for which in (labels, partners))
    assert torch.equal(own, other)
    assert torch.equal(targets.argmax(dim=1), torch.minimum(labels, partners))


def test_input_is_left_alone():
    images, labels = make_batch()
    before = images.clone()
    mixing_of().apply(
        images,
        labels,
        num_classes=CLASSES,
        smoothing=0.0,
        run_seed=0,
        epoch=0,
        step=0,
        item_ids=IDS,
    )
    assert torch.equal(images, before)


def test_an_odd_share_names_the_batch_size():
    with pytest.raises(CasemateError, match=r"train\.batch_size: a share of 5 leaves a worker"):
        mix(mixing_of(), slice(0, 5))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mixup": -1.0}, r"mixup: -1\.0 must be at least 0"),
        ({"mix_prob": 1.1}, r"mix_prob: 1\.1 must be at most 1"),
        ({"mix_mode": "elem"}, "mix_mode: elem is unknown"),
    ],
)
def test_wrong_settings_name_their_key(wrong, message):
    with pytest.raises(SettingError, match=message):
        mixing_of(**wrong)


def test_settings_without_an_alpha_do_not_mix():
    assert Mixing.of(AugmentSettings()) is None
    assert Mixing.of(AugmentSettings(cutmix=1.0)) == Mixing(AugmentSettings(cutmix=1.0))
