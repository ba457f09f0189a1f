"""Generated images, to test a pipeline without a dataset.

Each class is a wave of its own direction, length and colour; an item shifts it a little and adds
noise. Easy to learn on purpose: results on these images are not measurements.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from components.core.errors import CasemateError
from components.core.seeding import stream_key
from components.core.settings import MAX_SIDE
from components.data.sources.base import Entry, Pixels, SourceDefaults
from components.data.sources.registry import find_source

DEFAULTS = {option.name: option.default or 0 for option in find_source("made").options}
SHIFT = 0.5  # largest shift of an item's wave, in radians
NOISE = 16.0  # standard deviation, in grey levels


@dataclass(frozen=True)
class MadeSource(SourceDefaults):
    """Pixels depend on (seed, item id); labels alternate, so every split is balanced."""

    num_classes: int
    image_size: int
    channels: int
    counts: tuple[tuple[str, int], ...]  # items per split
    seed: int

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(str(label) for label in range(self.num_classes))

    @property
    def remarks(self) -> dict[str, str]:
        return {"made": "images are made on the spot; figures say nothing about a real dataset"}

    def entries(self) -> list[Entry]:
        return [
            Entry(name := f"made-{split}-{index:05d}", index % self.num_classes, split, name)
            for split, count in self.counts
            for index in range(count)
        ]

    def decode(self, entry: Entry) -> Pixels:
        bits = np.random.Philox(key=stream_key(self.seed, "made", entry.item_id, 0))
        random = np.random.Generator(bits)
        wave = self._wave(entry.label, shift=random.uniform(-SHIFT, SHIFT))
        noisy = 127.5 + 90 * wave + random.normal(0, NOISE, wave.shape)
        return np.clip(np.rint(noisy), 0, 255).astype(np.uint8)

    def _wave(self, label: int, *, shift: float) -> NDArray[np.float64]:
        """(H, W, C) in [-1, 1]: direction and length by the class, a phase for each channel."""
        angle = np.pi * label / self.num_classes
        cycles = 1 + label % 3
        row, column = np.mgrid[: self.image_size, : self.image_size] / self.image_size
        along = column * np.cos(angle) + row * np.sin(angle)
        phases = 2 * np.pi * label * np.arange(1, self.channels + 1) / self.num_classes
        wave: NDArray[np.float64] = np.cos(2 * np.pi * cycles * along[..., None] + phases + shift)
        return wave


def open_made(
    *,
    classes: int = DEFAULTS["classes"],
    image_size: int = DEFAULTS["image_size"],
    channels: int = DEFAULTS["channels"],
    train: int = DEFAULTS["train"],
    val: int = DEFAULTS["val"],
    test: int = DEFAULTS["test"],
    seed: int = DEFAULTS["seed"],
) -> MadeSource:
    """A generated dataset; each class has at least one training item."""
    for key, value, least in (
        ("classes", classes, 2),
        ("image_size", image_size, 1),
        ("train", train, classes),
        ("val", val, 1),
        ("test", test, 1),
        ("seed", seed, 0),
    ):
        if value < least:
            raise CasemateError(f"data.options.{key}", value, f"must be at least {least}")
    if image_size > MAX_SIDE:
        raise CasemateError("data.options.image_size", image_size, f"must be at most {MAX_SIDE}")
    if channels not in (1, 3):
        raise CasemateError("data.options.channels", channels, "is neither 1 nor 3")
    counts = (("train", train), ("val", val), ("test", test))
    return MadeSource(classes, image_size, channels, counts, seed)
