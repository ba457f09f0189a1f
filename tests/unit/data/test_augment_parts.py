"""Parts of the augmentation against the libraries they replace, given the same draws."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import timm.data.auto_augment
import timm.data.random_erasing
import torch
import torchvision.transforms.functional as tvf
import torchvision.transforms.transforms as tvt
from PIL import Image
from scipy import stats

from components.data.augment.boxes import ATTEMPTS, UNIFORMS
from components.data.augment.colour import ORDERS, jitter
from components.data.augment.draws import Draws
from components.data.augment.erasing import erase, erase_boxes
from components.data.augment.framing import crop_boxes, resize_crops, rotate
from components.data.augment.rand_augment import (
    SIGNED_BLENDS,
    SIGNED_RANGES,
    draw_operations,
    level_arguments,
    perform,
    policy,
    rand_augment,
)


def draws_of(num_items: int, *, epoch: int = 0) -> Draws:
    return Draws(tuple(f"item-{i}" for i in range(num_items)), 5, epoch)


def pictures(num_items: int, *, channels: int = 3, height: int = 20, width: int = 20):
    """Smooth random pictures: noise would hide differences in resampling."""
    coarse = torch.rand(num_items, channels, 4, 4, generator=torch.Generator().manual_seed(1))
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 1)
    return (smooth * 255).round().to(torch.uint8)


# -- resized crops


def scripted_torch(uniforms: np.ndarray) -> SimpleNamespace:
    """What torchvision's get_params uses of torch, with our draws instead of its own."""
    attempts, corner = iter(uniforms[: 2 * ATTEMPTS]), iter(uniforms[2 * ATTEMPTS :])

    class Cell:
        def uniform_(self, low, high) -> torch.Tensor:
            return torch.as_tensor(low + next(attempts) * (high - low), dtype=torch.float64)

    return SimpleNamespace(
        log=torch.log,
        exp=torch.exp,
        tensor=lambda values: torch.tensor(values, dtype=torch.float64),
        empty=lambda _: Cell(),
        randint=lambda low, high, size: torch.tensor(low + int(next(corner) * (high - low))),
    )


@pytest.mark.parametrize(
    ("image", "scale", "ratio"),
    [
        ((32, 32), (0.08, 1.0), (3 / 4, 4 / 3)),
        ((32, 32), (0.8, 1.2), (0.95, 1.05)),  # areas above the image's are drawn again
        ((20, 60), (0.9, 1.0), (0.9, 1.1)),  # nothing fits: central crop of full height
        ((60, 20), (0.9, 1.0), (0.9, 1.1)),
        ((24, 24), (1.5, 1.6), (0.9, 1.1)),  # nothing fits: the whole image
        ((37, 53), (0.3, 1.0), (0.5, 2.0)),
    ],
)
def test_crop_boxes_are_those_of_torchvision(monkeypatch, image, scale, ratio):
    draws = draws_of(150)
    places = crop_boxes(draws, image=image, scale=scale, ratio=ratio)
    for row, uniforms in enumerate(draws.uniforms("crop", UNIFORMS)):
        monkeypatch.setattr(tvt, "torch", scripted_torch(uniforms))
        expected = tvt.RandomResizedCrop.get_params(torch.empty(1, *image), scale, ratio)
        assert places[row].tolist() == list(expected)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_resized_pixels_are_those_of_pillow(channels, interpolation):
    images = pictures(12, channels=channels, height=40, width=31)
    places = crop_boxes(draws_of(12), image=(40, 31), scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3))
    result = resize_crops(images, places, size=24, interpolation=interpolation)
    assert result.dtype == torch.uint8
    mode = Image.Resampling[interpolation.upper()]
    for row, image in enumerate(images):
        top, left, height, width = places[row].tolist()
        crop = image[:, top : top + height, left : left + width].permute(1, 2, 0).numpy()
        picture = Image.fromarray(np.ascontiguousarray(crop[..., 0] if channels == 1 else crop))
        expected = np.asarray(picture.resize((24, 24), mode)).reshape(24, 24, channels)
        ours = result[row].permute(1, 2, 0).numpy()
        assert np.abs(ours.astype(int) - expected).max() <= 2  # each of two passes rounds


def test_crops_are_mirrored_after_they_are_scaled():
    images = pictures(8, channels=3, height=40, width=31)
    places = crop_boxes(draws_of(8), image=(40, 31), scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3))
    flips = [row % 3 == 0 for row in range(8)]
    options = {"size": 24, "interpolation": "bicubic"}
    plain = resize_crops(images, places, **options)
    expected = torch.where(torch.tensor(flips)[:, None, None, None], plain.flip(-1), plain)
    assert torch.equal(resize_crops(images, places, flips=flips, **options), expected)


# -- rotation and colours


def test_rotations_are_those_of_torchvision():
    draws, images = draws_of(16), pictures(16).float() / 255
    angles = (2 * draws.uniforms("rotation", 1)[:, 0] - 1) * 30
    assert angles.min() < -15 < 15 < angles.max()
    result = rotate(images, draws, degrees=30)
    for image, ours, angle in zip(images, result, angles, strict=True):
        expected = tvf.rotate(image, float(angle))
        differ = (ours != expected).any(dim=0).sum()
        assert differ <= 2  # of 400: pixels on the border between two nearest ones


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("strength", [0.4, 1.5])
def test_jitter_is_that_of_torchvision(channels, strength):
    draws, images = draws_of(24), pictures(24, channels=channels).float() / 255
    table = draws.uniforms("jitter", 4)
    low, high = max(0, 1 - strength), 1 + strength
    adjust = (tvf.adjust_brightness, tvf.adjust_contrast, tvf.adjust_saturation)
    orders = ORDERS[np.floor(table[:, 3] * 6).astype(int)]
    assert len({tuple(order) for order in orders}) == 6
    result = jitter(images, draws, strength=strength)
    for row, image in enumerate(images):
        expected = image
        for kind in orders[row]:
            expected = adjust[kind](expected, low + table[row, kind] * (high - low))
        torch.testing.assert_close(result[row], expected, atol=1e-5, rtol=0)


# -- random erasing


def scripted_random(uniforms: np.ndarray) -> SimpleNamespace:
    """timm's draws: whether, then area and aspect per attempt, then the corner."""
    attempts, corner = iter(uniforms[1:-2]), iter(uniforms[-2:])
    turns = itertools.cycle((False, True))

    def uniform(low: float, high: float) -> float:
        value = next(attempts)
        share = 1 - value if next(turns) else value  # timm: height over width, here its inverse
        return low + share * (high - low)

    return SimpleNamespace(
        random=lambda: uniforms[0],
        uniform=uniform,
        randint=lambda low, high: low + int(next(corner) * (high - low + 1)),
    )


@pytest.mark.parametrize(("height", "width"), [(32, 32), (7, 40)])
def test_erased_boxes_are_those_of_timm(monkeypatch, height, width):
    draws, images = draws_of(120), torch.full((120, 1, height, width), 2.0)
    area = (0.02, 1 / 3)
    result = erase(images, draws, prob=0.4, area=area, aspect=0.3)
    oracle = timm.data.random_erasing.RandomErasing(
        0.4, min_area=area[0], max_area=area[1], device="cpu"
    )
    for row, uniforms in enumerate(draws.uniforms("erase", UNIFORMS + 1)):
        monkeypatch.setattr(timm.data.random_erasing, "random", scripted_random(uniforms))
        expected = oracle(images[row].clone())  # constant 0 where it erases
        assert torch.equal(result[row] != 2, expected == 0)
    erased = (result != 2).flatten(1).any(dim=1).float().mean()
    assert 0.2 < erased < 0.6  # 0.4 of 120, standard deviation 0.045; fewer fit in the flat image


def test_erased_pixels_are_truncated_normals():
    draws, images = draws_of(60), torch.full((60, 3, 32, 32), 2.0)
    result = erase(images, draws, prob=1.0, area=(0.3, 0.3), aspect=1.0)
    noise = result[result != 2]
    assert noise.min() >= 0
    assert noise.max() <= 1
    expected = stats.truncnorm(-2, 2, loc=0.5, scale=0.25)
    fit = stats.kstest(noise[:5000].double().numpy(), expected.cdf)
    assert fit.pvalue > 1e-3
    pixels = result[0][result[0] != 2].reshape(3, -1)
    assert not torch.equal(pixels[0], pixels[1])  # each channel its own
    others = result[1][result[1] != 2].reshape(3, -1)
    assert pixels.shape == others.shape
    assert not torch.equal(pixels, others)  # and each item


def test_nothing_is_erased_that_was_not_chosen():
    boxes = erase_boxes(draws_of(50), image=(8, 8), prob=0.0, area=(0.02, 0.3), aspect=0.3)
    assert not boxes.found.any()


# -- RandAugment

SETTINGS = [
    "rand-m9-mstd0.5-inc1",
    "rand-m9-n3-mstd0.5",
    "rand-m7-n1-p1.0-inc1",
    "rand-m15-mmax20-mstd101-inc1",
    "rand-m9-tweights-mstd1-inc1",
    "rand-m8-t3a-mstd0.5",
]


def timm_random(*values: float, level: float = 0.0) -> SimpleNamespace:
    queue = iter(values)
    return SimpleNamespace(
        random=lambda: next(queue), gauss=lambda mean, std: level, uniform=lambda low, high: level
    )


@pytest.mark.parametrize("setting", SETTINGS)
def test_levels_mean_what_timm_means(monkeypatch, setting):
    rand = policy(setting, fill=(128,), interpolation="bicubic")
    for operation, level, negative in itertools.product(
        rand.ops, np.linspace(0, 20, 41), (False, True)
    ):
        signed = operation.name in SIGNED_RANGES or operation.name in SIGNED_BLENDS
        signs = [0.9 if negative else 0.1] if signed else []  # an unsigned map must draw nothing
        monkeypatch.setattr(timm.data.auto_augment, "random", timm_random(*signs))
        expected = (
            () if operation.level_fn is None else operation.level_fn(level, operation.hparams)
        )
        ours = level_arguments(operation, float(level), negative=negative)
        assert ours == pytest.approx(tuple(expected), rel=1e-15)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("setting", SETTINGS)
def test_pictures_are_those_of_timm(monkeypatch, setting, channels):
    images, draws = pictures(30, channels=channels), draws_of(30)
    fill = (10, 20, 30)[:channels]
    ours = rand_augment(images, draws, setting=setting, fill=fill, interpolation="bilinear")
    hparams = {
        "img_mean": fill if channels == 3 else 10,
        "interpolation": Image.Resampling.BILINEAR,
    }
    oracle = timm.data.auto_augment.rand_augment_transform(setting, hparams)
    plan = draw_operations(policy(setting, fill=(10,), interpolation="bilinear"), draws)
    for row, image in enumerate(images):
        array = image.permute(1, 2, 0).numpy()
        picture = Image.fromarray(np.ascontiguousarray(array[..., 0] if channels == 1 else array))
        for layer in range(oracle.num_layers):
            operation = oracle.ops[plan.operation[row, layer]]
            sign = 0.9 if plan.negative[row, layer] else 0.1
            chance = [] if operation.prob == 1 else [0.0 if plan.applied[row, layer] else 1.0]
            script = timm_random(*chance, sign, level=float(plan.level[row, layer]))
            monkeypatch.setattr(timm.data.auto_augment, "random", script)
            if operation.name == "PosterizeIncreasing" and plan.level[row, layer] == 10:
                continue  # timm's own call fails with this Pillow; see the next test
            picture = operation(picture)
        expected = np.asarray(picture).reshape(array.shape)
        assert np.array_equal(ours[row].permute(1, 2, 0).numpy(), expected)
    assert not torch.equal(ours, images)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_operation_works_over_its_whole_range(setting, channels):
    array = pictures(1, channels=channels)[0].permute(1, 2, 0).numpy()
    picture = Image.fromarray(np.ascontiguousarray(array[..., 0] if channels == 1 else array))
    fill = (1, 2, 3)[:channels]
    rand = policy(setting, fill=fill, interpolation="bicubic")
    top = rand.ops[0].magnitude_max or 10
    for operation, level, negative in itertools.product(
        rand.ops, np.linspace(0, top, 9), (False, True)
    ):
        result = perform(operation, picture, level=float(level), negative=negative)
        assert (result.size, result.mode) == (picture.size, picture.mode)


def test_no_bits_left_is_black():
    rand = policy("rand-m9-inc1", fill=(128,), interpolation="bicubic")
    (posterize,) = (op for op in rand.ops if op.name == "PosterizeIncreasing")
    grey = Image.new("L", (4, 4), 200)
    extrema = [
        perform(posterize, grey, level=level, negative=False).getextrema() for level in (9.9, 10.0)
    ]
    assert extrema == [(128, 128), (0, 0)]


def test_the_usual_setting_is_the_published_one():
    rand = policy("rand-m9-mstd0.5-inc1", fill=(128,), interpolation="bicubic")
    assert [operation.name for operation in rand.ops] == [
        "AutoContrast",
        "Equalize",
        "Invert",
        "Rotate",
        "PosterizeIncreasing",
        "SolarizeIncreasing",
        "SolarizeAdd",
        "ColorIncreasing",
        "ContrastIncreasing",
        "BrightnessIncreasing",
        "SharpnessIncreasing",
        "ShearX",
        "ShearY",
        "TranslateXRel",
        "TranslateYRel",
    ]
    assert rand.num_layers == 2
    assert {(op.magnitude, op.magnitude_std, op.prob) for op in rand.ops} == {(9, 0.5, 0.5)}


def test_plans_are_drawn_as_timm_draws_them():
    rand = policy("rand-m9-mstd0.5-inc1", fill=(128,), interpolation="bicubic")
    plan = draw_operations(rand, draws_of(3000))
    counts = np.bincount(plan.operation.ravel(), minlength=15)
    assert np.abs(counts - 400).max() < 5 * 400**0.5  # 6,000 picks of 15
    assert abs(plan.applied.mean() - 0.5) < 0.033  # 5 standard deviations
    assert abs(plan.negative.mean() - 0.5) < 0.033
    capped = np.minimum(stats.norm(9, 0.5).rvs(6000, random_state=0), 10)
    assert stats.ks_2samp(plan.level.ravel(), capped).pvalue > 1e-3
    assert (plan.operation[:, 0] != plan.operation[:, 1]).any()
    uniform = policy("rand-m15-mmax20-mstd101-inc1", fill=(128,), interpolation="bicubic")
    levels = draw_operations(uniform, draws_of(3000)).level.ravel()
    assert stats.kstest(levels, stats.uniform(0, 15).cdf).pvalue > 1e-3  # above 10 by mmax


def test_weighted_operations_come_without_replacement_in_proportion():
    rand = policy("rand-m9-n2-tweights-inc1", fill=(128,), interpolation="bicubic")
    plan = draw_operations(rand, draws_of(4000))
    assert (plan.operation[:, 0] != plan.operation[:, 1]).all()
    first = np.bincount(plan.operation[:, 0], minlength=len(rand.ops)) / 4000
    assert np.abs(first - rand.choice_weights).max() < 5 * (0.25 / 4000) ** 0.5
    # successive draws: P(second = j) = sum over i of w_i w_j / (1 - w_i)
    weights = np.asarray(rand.choice_weights)
    pairs = weights[:, None] * weights / (1 - weights)[:, None]
    np.fill_diagonal(pairs, 0)
    second = np.bincount(plan.operation[:, 1], minlength=len(rand.ops)) / 4000
    assert np.abs(second - pairs.sum(axis=0)).max() < 5 * (0.25 / 4000) ** 0.5
