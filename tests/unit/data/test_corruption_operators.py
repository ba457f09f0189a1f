"""Each operator against plain loops, with the same draws: at most one gray level on any pixel."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from components.data.corruptions import settings as corruption_settings
from components.data.corruptions.defocus import disk_kernel
from components.data.corruptions.fog import plasma
from components.data.corruptions.generate import corruption
from components.data.corruptions.glass import scan_sources
from components.data.sources.names import CORRUPTIONS, SEVERITIES
from tests.unit.data import corruption_oracles as oracles

LOOPS = [n for n in CORRUPTIONS if n not in ("frost", "jpeg_compression", "spatter")]


def photo(height: int, width: int) -> np.ndarray:
    """Smooth colours, hard edges, noise, and black, white and gray areas."""
    rng = np.random.default_rng(7)
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / 3 + k) + np.cos(y / 4 - k) for k in range(3)]
    image = np.stack(waves, axis=-1) * 50 + 128 + rng.normal(0, 8, (height, width, 3))
    image[: height // 4, : width // 3] = 0
    image[: height // 4, width // 3 : width // 2] = 255
    image[height // 4 : height // 2, : width // 4] = 100
    image[-5:, -5:] = rng.integers(0, 256, (5, 5, 3))
    return np.clip(image, 0, 255).astype(np.uint8)


@pytest.fixture
def large_constants(monkeypatch):
    """The constants of 224 pixels on images that loops can handle."""
    monkeypatch.setattr(corruption_settings, "SMALL_SIDE", 0)


def corrupted(name: str, image: np.ndarray, severity: int, **options):
    """The operator's result, its draws and its constants."""
    operator = corruption(name, **options)
    height, width = image.shape[:2]
    generator = torch.Generator().manual_seed(severity)
    draws = operator.sample(generator, height, width, severity)
    batch = {key: value[None] for key, value in draws.items()}
    before = {key: value.clone() for key, value in batch.items()}
    pixels = torch.from_numpy(image.copy())[None]
    result = operator.apply(pixels, batch, severity)
    assert torch.equal(pixels[0], torch.from_numpy(image)), "the input was changed"
    assert all(torch.equal(batch[key], before[key]) for key in batch), "the draws were changed"
    assert result.dtype == torch.uint8
    assert result.shape == pixels.shape
    constants = operator.constants(severity, height, width)
    return result[0].numpy(), {key: value.numpy() for key, value in draws.items()}, constants


def assert_near(found: np.ndarray, expected: np.ndarray, *, levels: int = 1) -> None:
    distance = np.abs(found.astype(int) - expected.astype(int))
    assert distance.max() <= levels, f"{(distance > levels).sum()} pixels, up to {distance.max()}"


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize("name", LOOPS)
def test_constants_of_32_pixels(name, severity):
    # Neither square nor even. At 19 a pixel lies between two of Pillow's boxes, a tie of rounding.
    image = photo(20 if name == "pixelate" else 19, 24)
    found, draws, constants = corrupted(name, image, severity)
    assert_near(found, getattr(oracles, name)(image, constants, draws))


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.usefixtures("large_constants")
def test_constants_of_224_pixels(name, severity):
    image = photo(25, 22)
    found, draws, constants = corrupted(name, image, severity)
    assert_near(found, getattr(oracles, name)(image, constants, draws))


@pytest.mark.parametrize("severity", [4, 5])
@pytest.mark.parametrize("size", [(30, 33), (70, 64)])
def test_mud(size, severity):
    image = photo(*size)
    found, draws, constants = corrupted("spatter", image, severity)
    expected = oracles.spatter_mud(image, constants, draws)
    assert_near(found, expected)
    assert not np.array_equal(found, image), "this seed draws no mud"


@pytest.mark.parametrize("severity", [1, 2, 3])
def test_water_brightens_towards_its_colour(severity):
    """The edges are OpenCV's; `test_golden_vectors` has its results."""
    image = photo(80, 72)
    found, _, constants = corrupted("spatter", image, severity)
    added = found.astype(int) - image
    free = (found < 255).all(axis=-1)
    assert (added >= 0).all()
    assert (added[..., 1][free] == added[..., 2][free]).all()  # 238 twice
    top = added[free].max(axis=0)
    assert top[1] <= 238 * constants[4] + 1
    assert top[1] > 60
    assert (np.abs(added[free][:, 0] - added[free][:, 1] * 175 / 238) <= 1).all()


@pytest.mark.parametrize("large", [False, True])
def test_frost_adds_a_crop_of_a_texture(tmp_path, monkeypatch, large):
    rng = np.random.default_rng(3)
    shapes = [(340, 345), (350, 340), (300, 400), (310, 333), (344, 322)]
    textures = [rng.integers(0, 256, (*shape, 3), dtype=np.uint8) for shape in shapes]
    for number, texture in enumerate(textures, 1):
        Image.fromarray(texture).save(tmp_path / f"frost{number}.png")
    side = 96 if large else 32
    image = photo(side, side)
    for severity in SEVERITIES:
        found, draws, (own, weight) = corrupted("frost", image, severity, textures=str(tmp_path))
        index, top, left = draws["uniform"]
        texture = textures[int(index * 5)]
        texture = texture if large else texture[2::5, 2::5]  # bilinear at 0.2 hits these pixels
        top, left = int(top * (len(texture) - side)), int(left * (texture.shape[1] - side))
        ice = texture[top : top + side, left : left + side].astype(float)
        assert_near(found, np.clip(own * image + weight * ice, 0, 255).astype(np.uint8))


@pytest.mark.parametrize("large", [False, True])
def test_jpeg_is_libjpeg_with_halved_colour(large):
    qualities = (25, 18, 15, 10, 7) if large else (80, 65, 58, 50, 40)
    image = photo(64, 70) if large else photo(31, 40)
    for severity, quality in zip(SEVERITIES, qualities, strict=True):
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "JPEG", quality=quality, subsampling="4:2:0")
        found, _, _ = corrupted("jpeg_compression", image, severity)
        assert np.array_equal(found, np.asarray(Image.open(buffer)))


# -- parts


def test_a_scan_copies_in_order():
    """Longest chains: every pixel takes the value of its right neighbour, so one value runs on."""
    height, width, delta = 5, 40, 2
    shifts = torch.zeros(1, 2, height - 2 * delta, width - 2 * delta, dtype=torch.int32)
    shifts[:, 0] = 1
    sources = scan_sources(shifts, height=height, width=width).view(height, width)
    own = torch.arange(height * width).view(height, width)
    last = int(own[3, width - delta + 1])
    assert (sources[3, delta + 1 : width - delta + 1] == last).all()
    outside = torch.ones(height, width, dtype=torch.bool)
    outside[3, delta + 1 : width - delta + 1] = False
    assert torch.equal(sources[outside].long(), own[outside])


@pytest.mark.parametrize("delta", [1, 2, 4])
def test_scans_equal_a_sequential_loop(delta):
    height, width = 23, 18
    rng = np.random.default_rng(delta)
    size = (4, 2, height - 2 * delta, width - 2 * delta)
    shifts = rng.integers(-delta, delta, size)
    found = scan_sources(torch.from_numpy(shifts), height=height, width=width).view(4, -1)
    for image, (own, rows) in enumerate(zip(shifts, found, strict=True)):
        values = np.arange(height * width).reshape(height, width)
        for y in range(height - delta, delta, -1):
            for x in range(width - delta, delta, -1):
                dx, dy = own[:, y - delta - 1, x - delta - 1]
                values[y, x] = values[y + dy, x + dx]
        assert np.array_equal(rows.numpy() - image * height * width, values.ravel())


def test_numpy_views_alias_in_a_swap():
    """The reason for the copy: the published tuple assignment loses the first value."""
    rows = np.array([[1, 1, 1], [2, 2, 2]])
    rows[0], rows[1] = rows[1], rows[0]
    assert rows.tolist() == [[2, 2, 2], [2, 2, 2]]


@pytest.mark.parametrize("decay", [1.4, 3])
def test_plasma_equals_diamond_square_point_by_point(decay):
    uniform = torch.rand(2, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
    found = plasma(uniform, decay)
    for own, heights in zip(uniform, found, strict=True):
        assert np.allclose(heights, oracles.plasma(own.numpy(), decay), atol=1e-5)


def test_disk_is_published_shape():
    assert disk_kernel(3, 0.1).sum() == pytest.approx(1)
    assert np.count_nonzero(disk_kernel(3, 0.1) > 1e-9) == 29  # x^2 + y^2 <= 9
    centre = np.zeros((17, 17))
    centre[8, 8] = 1
    assert np.allclose(disk_kernel(0.3, 1e-3), centre)  # one pixel: no blur
    assert disk_kernel(10, 0.5).shape == (21, 21)
    for radius, sigma in ((4, 0.5), (8, 0.5), (10, 0.5), (1.5, 0.1)):
        assert np.allclose(disk_kernel(radius, sigma), oracles.disk(radius, sigma))
