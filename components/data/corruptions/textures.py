"""Textures of frost: the published photographs from a folder, or procedural crystals.

The photographs frost1 to frost5 come with the code of Hendrycks & Dietterich 2019 (Apache-2.0); a
sixth one is there but never drawn. Without them five crystal textures are generated. Accuracies on
these are not comparable with published ones, and results carry the flag `procedural_frost`.
"""

from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from components.core.errors import CasemateError
from components.data.sources.files import FORMATS

NUM_TEXTURES = 5
SUFFIXES = (".png", ".jpg", ".jpeg")
HEIGHT, WIDTH = 320, 448  # of procedural textures
SHADOW, LIGHT = (92.0, 114.0, 134.0), (236.0, 244.0, 250.0)
Texture = NDArray[np.uint8]  # (H, W, 3)


def texture_files(folder: str) -> list[Path]:
    """The five photographs of a folder."""
    found = [
        next((p for s in SUFFIXES if (p := Path(folder) / f"frost{number}{s}").is_file()), None)
        for number in range(1, NUM_TEXTURES + 1)
    ]
    files = [path for path in found if path is not None]
    if len(files) < NUM_TEXTURES:
        lacking = ", ".join(f"frost{n}" for n, path in enumerate(found, 1) if path is None)
        remedy = f"lacks {lacking} (.png or .jpg); these photographs come with ImageNet-C's code"
        raise CasemateError("corruptions.textures", folder, remedy)
    return files


@lru_cache(maxsize=4)
def load_textures(folder: str | None) -> tuple[Texture, ...]:
    """Five textures: of the folder, or procedural."""
    if folder is None:
        return tuple(crystal_texture(number) for number in range(NUM_TEXTURES))
    return tuple(_read(path) for path in texture_files(folder))


def _read(path: Path) -> Texture:
    try:
        with Image.open(path, formats=FORMATS) as image:
            return np.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        remedy = f"is not a readable image ({error}); copy it again"
        raise CasemateError("corruptions.textures", path, remedy) from error


def crystal_texture(number: int) -> Texture:
    """Ice needles: ridges of oriented noise, the strongest of six directions in each place.

    Brightness and contrast are within those of the photographs.
    """
    generator = np.random.Generator(np.random.Philox(key=number))
    down = np.fft.fftfreq(HEIGHT)[:, None]
    across = np.fft.rfftfreq(WIDTH)[None]
    frequency = np.hypot(down, across)
    angle = np.arctan2(down, across)
    height = np.zeros((HEIGHT, WIDTH))
    for direction in (np.arange(6) + generator.random()) * np.pi / 6:
        narrow = np.exp(-((np.sin(angle - direction) / 0.12) ** 2))
        needles = _noise(generator, narrow * np.exp(-((np.log(frequency + 1e-9) + 3.8) ** 2)))
        places = _noise(generator, np.exp(-((frequency / 0.012) ** 2)))
        ridges = np.clip(1 - np.abs(needles), 0, 1) ** 2
        height = np.maximum(height, ridges / (1 + np.exp(-2 * places)))
    grain = 0.08 * _noise(generator, np.exp(-((frequency / 0.2) ** 2)))
    light = np.clip(height + grain, 0, 1)[..., None]
    colours: NDArray[np.float64] = np.array(SHADOW) + light * (np.array(LIGHT) - np.array(SHADOW))
    return colours.astype(np.uint8)


def _noise(generator: np.random.Generator, amplitude: NDArray[np.float64]) -> NDArray[np.float64]:
    """Gaussian noise with this spectrum, mean 0 and deviation 1."""
    spectrum = np.fft.rfft2(generator.standard_normal((HEIGHT, WIDTH))) * amplitude
    spectrum[0, 0] = 0
    field = np.fft.irfft2(spectrum, s=(HEIGHT, WIDTH))
    return np.asarray(field / field.std())


@lru_cache(maxsize=32)
def fitted_texture(folder: str | None, number: int, height: int, width: int, step: int) -> Texture:
    """Texture for images of this size: every `step`-th pixel, enlarged if it is not larger.

    A step of 5 starts at pixel 2: that is bilinear scaling by 0.2, whose samples fall on pixels.
    """
    texture = load_textures(folder)[number][step // 2 :: step, step // 2 :: step]
    factor = max((height + 1) / texture.shape[0], (width + 1) / texture.shape[1])
    if factor <= 1:
        return texture
    size = (int(np.ceil(texture.shape[1] * factor)), int(np.ceil(texture.shape[0] * factor)))
    return np.asarray(Image.fromarray(texture).resize(size, Image.Resampling.BILINEAR))
