"""The 19 corruptions as a whole: golden vectors, addressed randomness, statistics, bad input."""

import hashlib
import io
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats

from components.core.errors import CasemateError
from components.data.corruptions import corrupt, encoding, generate
from components.data.corruptions import settings as corruption_settings
from components.data.corruptions.generate import corruption
from components.data.corruptions.settings import CORRUPTIONS, flags_of, unit_of
from components.data.corruptions.stored import image_ids, open_variant, stored_variants
from components.data.corruptions.textures import NUM_TEXTURES, load_textures
from components.data.sources.names import BENCHMARK_CORRUPTIONS, SEVERITIES, imagenet_synsets
from components.data.sources.names import CORRUPTIONS as NAMES
from tests.unit.data.golden_corruptions import (
    SIDES,
    VECTORS,
    golden_draws,
    golden_image,
    positions,
    write_textures,
)

RANDOM = [n for n in NAMES if n not in (
    "defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression",
    "gaussian_blur", "saturate",
)]  # fmt: skip


def photos(count: int, height: int, width: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    smooth = rng.normal(size=(count, height // 4 + 1, width // 4 + 1, 3)).repeat(4, 1).repeat(4, 2)
    noisy = 128 + 45 * smooth[:, :height, :width] + rng.normal(0, 5, (count, height, width, 3))
    return np.clip(noisy, 0, 255).astype(np.uint8)


def ids(count: int) -> list[str]:
    return [f"item-{number}" for number in range(count)]


# -- against the reference programs


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", NAMES)
def test_golden_vectors(name, side, tmp_path):
    """Within one gray level of ImageMagick, OpenCV, scikit-image and scipy on the same draws.

    And nearly always equal: rounding in place of truncation would move half of the pixels.
    """
    write_textures(tmp_path)
    operator = corruption(name, textures=str(tmp_path))
    image = torch.from_numpy(golden_image(side))[None]
    rows, columns = positions(side)
    with np.load(VECTORS) as vectors:
        expected = vectors[f"{name}-{side}"]
    changed = []
    for severity in SEVERITIES:
        draws = {k: v[None] for k, v in golden_draws(operator, side, severity).items()}
        found = operator.apply(image, draws, severity)[0].numpy()[rows, columns]
        distance = np.abs(found.astype(int) - expected[severity - 1])
        assert distance.max() <= 1, f"severity {severity}: {distance.max()} gray levels"
        changed.append((distance > 0).mean())
    assert np.mean(changed) < 0.1


def test_random_streams_do_not_move():
    """Whole numbers of the generator and float64 filters: the same bytes on every machine."""
    out = corrupt(photos(2, 40, 33), name="glass_blur", severity=4, seed=5, item_ids=ids(2))
    digest = hashlib.sha256(out.tobytes()).hexdigest()
    assert digest[:16] == "2cc91a4c6159fdf5"


def test_names_order_and_groups_are_those_of_the_benchmark():
    assert tuple(CORRUPTIONS) == NAMES
    groups = [CORRUPTIONS[name].settings.group for name in NAMES]
    assert (
        groups == ["noise"] * 3 + ["blur"] * 4 + ["weather"] * 4 + ["digital"] * 4 + ["extra"] * 4
    )
    assert [unit_of(name, 1) for name in NAMES] == list(range(0, 95, 5))
    assert unit_of("saturate", 5) == 94
    for name in NAMES:
        cls = CORRUPTIONS[name].settings
        assert len(cls.at_224) == len(cls.at_32) == 5
        assert len({len(row) for row in (*cls.at_224, *cls.at_32)}) == 1


# -- addressed randomness


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [(32, 32), (65, 70)])
def test_an_image_does_not_depend_on_its_batch(name, size, monkeypatch):
    """Batches of 1, 3 and 8, any order, any chunk: the same bytes."""
    images, names = photos(8, *size), ids(8)
    severity = 1 + NAMES.index(name) % 5
    settings = {"name": name, "severity": severity, "seed": 3}
    whole = corrupt(images, item_ids=names, **settings)
    assert whole.dtype == np.uint8
    assert whole.shape == images.shape
    single = [corrupt(images[i : i + 1], item_ids=names[i : i + 1], **settings) for i in range(8)]
    assert np.array_equal(np.concatenate(single), whole)
    order = np.random.default_rng(1).permutation(8)
    monkeypatch.setattr(generate, "CHUNK_ELEMENTS", 3 * images[0].size)
    mixed = corrupt(images[order], item_ids=[names[i] for i in order], **settings)
    assert np.array_equal(mixed, whole[order])


@pytest.mark.parametrize("name", NAMES)
def test_an_image_does_not_depend_on_the_number_of_threads(name):
    """Noise shows each change of rounding; torch's `interpolate` was found out by it."""
    noise = np.random.default_rng(0).integers(0, 256, (1, 224, 224, 3), dtype=np.uint8)
    threads, found = torch.get_num_threads(), []
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            found.append(corrupt(noise, name=name, severity=3, seed=0, item_ids=["a"]))
    finally:
        torch.set_num_threads(threads)
    assert np.array_equal(*found)


@pytest.mark.parametrize("name", RANDOM)
def test_draws_belong_to_seed_item_and_severity(name):
    image = np.repeat(photos(1, 32, 32), 2, axis=0)
    settings = {"name": name, "severity": 5, "seed": 0, "item_ids": ["a", "b"]}
    base = corrupt(image, **settings)
    assert not np.array_equal(base[0], base[1])
    assert not np.array_equal(base, corrupt(image, **{**settings, "seed": 1}))
    assert np.array_equal(base, corrupt(image, **settings))
    operator = corruption(name)
    drawn = {}
    for severity in (1, 2):  # a fixed shape of draws, so that only the address differs
        generator = generate.generator_for(0, "corruption", "a", unit_of(name, severity))
        drawn[severity] = operator.sample(generator, 32, 32, 1)
    assert any(not torch.equal(drawn[1][key], drawn[2][key]) for key in drawn[1])


@pytest.mark.parametrize("name", NAMES)
def test_tensors_and_arrays_give_the_same(name):
    images = photos(2, 40, 37)
    before = images.copy()
    settings = {"name": name, "severity": 2, "seed": 0, "item_ids": ids(2)}
    array = corrupt(images, **settings)
    tensor = corrupt(torch.from_numpy(images), **settings)
    assert isinstance(array, np.ndarray)
    assert np.array_equal(tensor.numpy(), array)
    assert np.array_equal(images, before)
    views = np.ascontiguousarray(images.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    assert np.array_equal(corrupt(views, **settings), array)
    images.flags.writeable = False  # as read from a table
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(corrupt(images, **settings), array)
    assert corrupt(images[:0], **{**settings, "item_ids": []}).shape == (0, 40, 37, 3)


# -- identities and closed forms


def test_truncation_keeps_all_gray_levels():
    """v / 255 * 255 truncates back to v: the identity survives."""
    levels = np.arange(256, dtype=np.uint8)
    for dtype in (np.float32, np.float64):
        assert np.array_equal((levels / dtype(255) * dtype(255)).astype(np.uint8), levels)


@pytest.mark.parametrize(
    ("name", "constants"),
    [("contrast", (1,)), ("zoom_blur", (1, 0.01)), ("frost", (1, 0)), ("gaussian_blur", (0.1,)),
     ("defocus_blur", (0.3, 0.001)), ("brightness", (0,)), ("saturate", (1, 0)),
     ("elastic_transform", (0, 0, 0)), ("gaussian_noise", (0,)), ("speckle_noise", (0,)),
     ("impulse_noise", (0,)), ("pixelate", (1,))],
)  # fmt: skip
def test_identities(name, constants, monkeypatch):
    monkeypatch.setattr(CORRUPTIONS[name].settings, "at_32", (constants,) * 5)
    ramp = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
    image = np.stack([ramp, ramp.transpose(0, 2, 1), 255 - ramp], axis=-1)
    assert np.array_equal(corrupt(image, name=name, severity=3, seed=0, item_ids=["a"]), image)


@pytest.mark.parametrize("name", ["gaussian_blur", "defocus_blur", "zoom_blur", "glass_blur",
                                  "motion_blur", "elastic_transform", "contrast"])  # fmt: skip
@pytest.mark.parametrize("side", [32, 64])
def test_flat_images_stay_flat(name, side):
    """Float rounding must not lose a gray level; glass may lose one as the published code does."""
    levels = np.array([0, 1, 77, 100, 200, 254, 255], dtype=np.uint8)
    images = np.broadcast_to(levels[:, None, None, None], (7, side, side, 3)).copy()
    out = corrupt(images, name=name, severity=2, seed=0, item_ids=ids(7)).astype(int)
    slack = 2 if name == "glass_blur" else 1 if name == "defocus_blur" and side == 64 else 0
    assert np.abs(out - images).max() <= slack


def test_gray_pixels_turn_red_where_saturation_is_added():
    gray = np.full((1, 64, 64, 3), 100, dtype=np.uint8)
    kept = corrupt(gray, name="saturate", severity=3, seed=0, item_ids=["a"])
    assert np.array_equal(kept, gray)
    red = corrupt(gray, name="saturate", severity=5, seed=0, item_ids=["a"])
    assert red[0, 0, 0].tolist() == [100, 80, 80]  # S' = 0.2


def test_brightness_of_black_is_gray():
    black = np.zeros((1, 64, 64, 3), dtype=np.uint8)
    out = corrupt(black, name="brightness", severity=2, seed=0, item_ids=["a"])
    assert (out == 51).all()


# -- statistics of the noise


def noisy(name: str, severity: int, level: int, side: int) -> np.ndarray:
    images = np.full((4, side, side, 3), level, dtype=np.uint8)
    return corrupt(images, name=name, severity=severity, seed=11, item_ids=ids(4)).astype(float)


@pytest.mark.parametrize(("name", "scale"), [("gaussian_noise", 1), ("speckle_noise", 128 / 255)])
def test_normal_noise_has_its_deviation(name, scale):
    (deviation,) = CORRUPTIONS[name].settings.at_224[0]
    sigma = 255 * deviation * scale
    values = noisy(name, 1, 128, 96)
    count = values.size
    assert (
        abs(values.mean() - 127.5) < 5 * sigma / count**0.5 + 0.01
    )  # truncation costs half a level
    assert abs(values.var() - (sigma**2 + 1 / 12)) < 5 * sigma**2 * (2 / count) ** 0.5
    channels = values.reshape(-1, 3)
    assert abs(np.corrcoef(channels.T)[0, 1]) < 5 / len(channels) ** 0.5  # independent


@pytest.mark.parametrize(("severity", "level"), [(1, 128), (3, 40), (5, 230), (5, 3)])
def test_shot_noise_is_poisson(severity, level):
    (photons,) = CORRUPTIONS["shot_noise"].settings.at_224[severity - 1]
    values = noisy("shot_noise", severity, level, 64)
    grays = np.minimum(np.arange(photons + 1) / photons * 255, 255).astype(np.uint8)
    law = stats.poisson(photons * level / 255)
    shares = law.pmf(np.arange(photons))
    shares = np.append(shares, 1 - shares.sum())
    seen = np.array([(values == gray).sum() for gray in grays])
    assert seen.sum() == values.size
    likely = shares * values.size > 10
    pooled = [np.append(part[likely], part[~likely].sum()) for part in (seen, shares * values.size)]
    enough = pooled[1] > 0.5
    chi2 = ((pooled[0] - pooled[1])[enough] ** 2 / pooled[1][enough]).sum()
    assert stats.chi2.sf(chi2, enough.sum() - 1) > 1e-4


def test_black_and_white_survive_shot_noise_as_the_law_says():
    assert (noisy("shot_noise", 5, 0, 32) == 0).all()
    white = noisy("shot_noise", 5, 255, 96)
    share = stats.poisson(3).sf(2)  # three photons or more are clipped to white
    assert abs((white == 255).mean() - share) < 5 * (share / white.size) ** 0.5


@pytest.mark.parametrize("severity", [1, 5])
def test_impulse_noise_replaces_its_share_half_and_half(severity):
    (share,) = CORRUPTIONS["impulse_noise"].settings.at_224[severity - 1]
    values = noisy("impulse_noise", severity, 128, 96)
    for gray in (0, 255):
        assert abs((values == gray).mean() - share / 2) < 5 * (share / 2 / values.size) ** 0.5
    assert set(np.unique(values)) == {0, 128, 255}
    changed = (values != 128).reshape(-1, 3)
    assert abs(changed.all(axis=1).mean() - share**3) < 5 * (share**3 / len(changed)) ** 0.5 + 1e-9


def test_angles_and_shifts_fill_their_ranges():
    for name, low, high in (("motion_blur", -45, 45), ("snow", -135, -45)):
        operator = corruption(name)
        angles = [
            float(operator.sample(torch.Generator().manual_seed(i), 8, 8, 1)["angle"])
            for i in range(300)
        ]
        assert low <= min(angles) < low + 2
        assert high - 2 < max(angles) <= high
    shifts = corruption("glass_blur").sample(torch.Generator().manual_seed(0), 64, 64, 5)["shifts"]
    assert shifts.shape == (2, 2, 56, 56)
    assert torch.bincount(shifts.flatten() + 4).gt(1400).all()  # 8 values of 1568 each
    assert (shifts.min(), shifts.max()) == (-4, 3)


# -- frost, JPEG files, flags


def test_procedural_frost_is_flagged_and_looks_like_ice():
    textures = load_textures(None)
    assert len(textures) == NUM_TEXTURES
    assert len({texture.tobytes() for texture in textures}) == NUM_TEXTURES
    for texture in textures:
        assert texture.std() > 20
        assert texture[..., 2].mean() > texture[..., 0].mean()  # bluish
    assert flags_of("frost", height=224, width=224) == ["procedural_frost"]
    assert flags_of("frost", height=224, width=224, textures="somewhere") == []
    assert flags_of("frost", height=96, width=96) == ["nonstandard_resolution", "procedural_frost"]
    assert flags_of("fog", height=32, width=32) == []
    assert flags_of("fog", height=32, width=224) == ["nonstandard_resolution"]


def test_frost_on_images_larger_than_its_textures():
    image = photos(1, 400, 330)
    out = corrupt(image, name="frost", severity=5, seed=0, item_ids=["a"])
    assert out.shape == image.shape


def test_textures_that_are_not_there_are_named(tmp_path):
    write_textures(tmp_path)
    (tmp_path / "frost2.png").unlink()
    (tmp_path / "frost4.png").write_text("not an image")
    settings = {"name": "frost", "severity": 1, "seed": 0, "item_ids": ["a"]}
    with pytest.raises(CasemateError, match="lacks frost2 "):
        corrupt(photos(1, 32, 32), textures=str(tmp_path), **settings)
    Image.new("RGB", (400, 400)).save(tmp_path / "frost2.jpg")
    with pytest.raises(CasemateError, match=r"frost4\.png is not a readable image"):
        corrupt(photos(1, 32, 32), textures=str(tmp_path), **settings)


def test_released_fidelity_is_the_jpeg_of_the_raw_image():
    images = photos(2, 64, 64)
    settings = {"name": "contrast", "severity": 1, "seed": 0, "item_ids": ids(2)}
    raw = corrupt(images, **settings)
    released = corrupt(images, fidelity="released", **settings)
    for before, after in zip(raw, released, strict=True):
        buffer = io.BytesIO()
        Image.fromarray(before).save(buffer, "JPEG", quality=85, optimize=True)
        assert np.array_equal(np.asarray(Image.open(buffer)), after)
    assert encoding.RELEASED_QUALITY == 85


# -- bad input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "rain"}, "name: 'rain' is unknown"),
        ({"severity": 0}, "severity: 0 is not one of 1 to 5"),
        ({"severity": 6}, "severity: 6"),
        ({"fidelity": "jpeg"}, "fidelity: 'jpeg'"),
        ({"item_ids": ["a"]}, "item_ids: 1 for 2 images"),
        ({"item_ids": "ab"}, "item_ids"),
        ({"images": np.zeros((2, 32, 32, 3), np.float32)}, r"images: torch.float32"),
        ({"images": np.zeros((2, 3, 32, 32), np.uint8)}, r"expected uint8 \(N, H, W, 3\)"),
        ({"images": np.zeros((2, 32, 32), np.uint8)}, r"expected uint8 \(N, H, W, 3\)"),
        ({"images": np.zeros((2, 7, 32, 3), np.uint8)}, "sides must be 8 or more"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    good = {
        "images": photos(2, 32, 32), "name": "fog", "severity": 1, "seed": 0, "item_ids": ["a", "b"]
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        corrupt(**{**good, **change})


def test_every_corruption_runs_on_the_smallest_images():
    for name in NAMES:
        for severity in (1, 5):
            out = corrupt(photos(1, 8, 9), name=name, severity=severity, seed=0, item_ids=["a"])
            assert out.shape == (1, 8, 9, 3)


def test_water_without_opencv_is_one_clear_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "cv2", None)  # as if it were not installed
    settings = {"name": "spatter", "seed": 0, "item_ids": ["a"]}
    with pytest.raises(CasemateError, match="spatter needs OpenCV") as caught:
        corrupt(photos(1, 32, 32), severity=1, **settings)
    assert "\n" not in str(caught.value)
    assert "pip install 'casemate[spatter]'" in str(caught.value)
    corrupt(photos(1, 32, 32), severity=4, **settings)  # mud needs none


def test_settings_need_no_numerical_library():
    code = (
        "import sys, components.data.corruptions.settings, components.evaluate.settings;"
        "print(*sorted({'torch', 'numpy', 'scipy', 'PIL', 'cv2'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


# -- published datasets


def test_stored_cifar_c_agrees_with_the_generator(tmp_path):
    images, names = photos(4, 32, 32), ids(4)
    chosen = ("fog", "contrast")
    for name in chosen:
        levels = [
            corrupt(images, name=name, severity=s, seed=0, item_ids=names) for s in SEVERITIES
        ]
        np.save(tmp_path / f"{name}.npy", np.concatenate(levels))
    np.save(tmp_path / "labels.npy", np.tile(np.arange(4), 5))
    variants = stored_variants("cifar10_c", tmp_path)
    assert variants == [(name, level) for name in chosen for level in SEVERITIES]
    source = open_variant("cifar10_c", tmp_path, ("contrast", 4))
    read = np.stack([source.decode(entry) for entry in source.entries()])
    expected = corrupt(images, name="contrast", severity=4, seed=0, item_ids=names)
    assert np.array_equal(read, expected)
    assert image_ids(("contrast", 4), source.entries()) == [f"{i:05d}" for i in range(4)]
    with pytest.raises(CasemateError, match="lacks snow/1"):
        open_variant("cifar10_c", tmp_path, ("snow", 1))


@pytest.mark.parametrize("group", ["", "weather/"])
def test_stored_imagenet_c_agrees_with_the_generator(tmp_path, group):
    wnid = imagenet_synsets()[9]
    out = corrupt(photos(1, 64, 64), name="fog", severity=2, seed=0, item_ids=["v"])
    for level in (2, 5):
        folder = tmp_path / f"{group}fog" / str(level) / wnid
        folder.mkdir(parents=True)
        Image.fromarray(out[0]).save(folder / "v.png")
    assert stored_variants("imagenet_c", tmp_path) == [("fog", 2), ("fog", 5)]
    source = open_variant("imagenet_c", tmp_path, ("fog", 2), subset=True)
    (entry,) = source.entries()
    assert entry.label == 9
    assert np.array_equal(source.decode(entry), out[0])
    assert image_ids(("fog", 2), [entry]) == [f"{wnid}/v.png"]


def test_folders_without_a_corruption_are_refused(tmp_path):
    with pytest.raises(CasemateError, match="holds no corruption; expected <corruption>/"):
        stored_variants("imagenet_c", tmp_path)
    with pytest.raises(CasemateError, match="lacks the file labels"):
        stored_variants("cifar10_c", tmp_path)
    np.save(tmp_path / "labels.npy", np.zeros(5))
    with pytest.raises(CasemateError, match=r"holds no corruption; expected <corruption>\.npy"):
        stored_variants("cifar10_c", tmp_path)


def test_large_and_small_constants_meet_at_64_pixels():
    operator = corruption("gaussian_noise")
    assert operator.constants(5, 64, 64) == (0.38,)
    assert operator.constants(5, 63, 224) == (0.10,)
    assert corruption_settings.PUBLISHED_SIZES == ((224, 224), (32, 32))
    assert len(BENCHMARK_CORRUPTIONS) == 15
