"""Input of the golden vectors `golden_corruptions.npz`: images, draws, textures, pixel positions.

The vectors hold what the reference programs made of this input, at a sample of pixels: ImageMagick
6.9.11 (motion), OpenCV 5.0 (disk, affine map, drops), scikit-image 0.26 and scipy 1.17 (filters,
HSV, zoom, displacements), Pillow 13, put together as the released scripts of Hendrycks &
Dietterich 2019 describe, with these draws in place of theirs. 32 and 64 pixels have the constants
of CIFAR-10-C and ImageNet-C.
"""

import math
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from components.data.corruptions.interface import Corruption, Draws

VECTORS = Path(__file__).with_name("golden_corruptions.npz")
SIDES = (32, 64)


def golden_image(side: int) -> np.ndarray:
    """(side, side, 3) uint8: gradients and edges, with black, white and gray areas."""
    y, x = np.mgrid[:side, :side] / side
    waves = [0.5 + 0.4 * np.sin(9 * x + 5 * y * (k + 1)) * np.cos(7 * y - k) for k in range(3)]
    image = np.floor(255 * np.stack(waves, axis=-1)).astype(np.uint8)
    image[(np.mgrid[:side, :side].sum(axis=0) % 11) == 0] = (200, 30, 90)
    quarter = side // 4
    image[:quarter, :quarter], image[:quarter, -quarter:], image[-quarter:, :quarter] = 0, 255, 77
    return image


def golden_draws(operator: Corruption, side: int, severity: int) -> Draws:
    """The draws of generator 1000 side + severity."""
    generator = torch.Generator().manual_seed(1000 * side + severity)
    return operator.sample(generator, side, side, severity)


def write_textures(folder: Path) -> None:
    """Five textures that are larger than 64 pixels, also after scaling by 0.2 than 32."""
    for number in range(1, 6):
        y, x = np.mgrid[: 330 + number, : 350 - 3 * number]
        layers = [(x * (3 + k) + y * (number + k)) % 256 for k in range(3)]
        Image.fromarray(np.stack(layers, axis=-1).astype(np.uint8)).save(
            folder / f"frost{number}.png"
        )


def positions(side: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of the stored pixels: corners, edges and a lattice inside."""
    last = side - 1
    steps = [math.floor(k * last / 6) for k in range(7)]
    rows, columns = np.meshgrid(steps, steps, indexing="ij")
    return rows.ravel(), columns.ravel()
