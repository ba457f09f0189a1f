"""Settings of the evaluation suites; defaults are those of Bhojanapalli et al. 2021."""

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Literal

from annotated_types import MinLen

from components.attacks.settings import SpatialSettings
from components.core.settings import Count, PositivePixels, Problem, Settings, settings

TransferKind = Literal["fgsm", "pgd"]
Pooling = Literal["mean", "sum", "max"]
LARGE_SIDE = 64  # images from here on are evaluated with the constants for 224 pixels


@settings
class SubsetSettings(Settings):
    """Which items a suite evaluates: the first in a seeded order, or those of a list."""

    num_items: Count | None = None
    """None: all."""
    item_ids: tuple[str, ...] | None = None
    by_class: bool = False
    """Whether classes keep their shares."""

    def problems(self) -> Iterator[Problem]:
        if self.item_ids is not None and (self.num_items is not None or self.by_class):
            yield Problem("item_ids", f"{len(self.item_ids)} ids", "leave nothing else to choose")
        if self.by_class and self.num_items is None:
            yield Problem("by_class", True, "does nothing without num_items")


@settings
class CalibrationSettings(Settings):
    """Expected calibration error and reliability table."""

    num_bins: Count = 15
    """Of equal width."""


@settings
class ShiftSuiteSettings(Settings):
    """A shifted dataset against the clean one, on the classes that the two share."""

    kind: Literal["shifts"] = "shifts"
    class_map: dict[str, str | None] = dataclasses.field(default_factory=dict)
    """Class of the shifted dataset -> class of the model, where their names differ; null leaves
    the class out."""


@settings
class ShapeBiasSuiteSettings(Settings):
    """Shape against texture on conflict stimuli (Geirhos et al. 2019)."""

    kind: Literal["shape_bias"] = "shape_bias"
    pooling: Pooling = "mean"
    """Of the probabilities of a class's ImageNet indices; `sum` favours dog and bird."""


@settings
class TransferSuiteSettings(Settings):
    """Perturbations of each model, evaluated on all models."""

    kind: Literal["transfer"] = "transfer"
    attacks: Annotated[tuple[TransferKind, ...], MinLen(1)] = ("fgsm", "pgd")
    eps: PositivePixels = 1 / 255
    """Pixels in l-inf: one gray level."""
    num_steps: Count = 8
    """Of PGD, each of size eps / num_steps; FGSM takes one step of eps."""
    resample: Literal["bilinear"] | None = None
    """Resize perturbations between models of different input sizes. None: no result for them."""

    def problems(self) -> Iterator[Problem]:
        if len(set(self.attacks)) < len(self.attacks):
            yield Problem("attacks", ", ".join(self.attacks), "names an attack twice")


@settings
class SpatialSuiteSettings(Settings):
    """All rotations and shifts of a grid on every item."""

    kind: Literal["spatial"] = "spatial"
    grid: SpatialSettings | None = None
    """None: 9 x 9 shifts of up to 16 pixels, or the published 5 x 5 of up to 3 below 64 pixels."""
    chunk_size: Count = 81
    """Poses in one forward pass, of one image."""
    early_exit: bool = True
    """Stop an image at the first chunk that breaks it: the same verdict, but no failure map."""

    def grid_at(self, side: int) -> SpatialSettings:
        """The grid for images of this side."""
        if self.grid is not None:
            return self.grid
        large = SpatialSettings(max_shift=16.0, num_shifts=9)
        return large if side >= LARGE_SIDE else SpatialSettings()
