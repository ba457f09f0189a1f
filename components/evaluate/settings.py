"""Settings of the evaluation suites; defaults are those of Bhojanapalli et al. 2021."""

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from annotated_types import MinLen

from components.attacks.settings import SpatialSettings
from components.core import user_code
from components.core.hints import did_you_mean
from components.core.object_stores import is_uri, uri_problem
from components.core.settings import (
    Count,
    Name,
    PositivePixels,
    Problem,
    Settings,
    Side,
    default_of,
    settings,
)
from components.data.corruptions.settings import CORRUPTIONS, SMALL_SIDE, Fidelity, Severity
from components.data.settings import Fit, source_problems
from components.data.sources.names import BENCHMARK_CORRUPTIONS, SEVERITIES

TransferKind = Literal["fgsm", "pgd"]
Pooling = Literal["mean", "sum", "max"]
PREPARED = "prepared"  # source of a shifted dataset that the prepare stage has written


@settings
class SubsetSettings(Settings):
    """Which items a suite evaluates: the first in a seeded order, or those of a list."""

    num_items: Count | None = None
    """None: all."""
    item_ids: tuple[str, ...] | None = None
    """These items and no others."""
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

    source: str = PREPARED
    """`prepared` (a folder with dataset.json) or a source of `casemate data`, e.g. imagenet_r."""
    path: str | None = None
    """Files of the shifted dataset."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Options of the source."""
    fit: Fit | None = None
    """How images become the models' size. None: as the recipe's data are fitted."""
    resize: Side | None = None
    """Short side before `fit: crop`; None: the models' side."""
    class_map: dict[str, str | None] = dataclasses.field(default_factory=dict)
    """Class of the shifted dataset -> class of the model, where their names differ; null leaves
    the class out."""
    num_items: Count | None = None
    """First in a seeded order; None: all."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", user_code.pinned(self.source, field="source"))
        Settings.__post_init__(self)

    def problems(self) -> Iterator[Problem]:
        if self.source != PREPARED:
            yield from source_problems(self.source, self.path)
        elif self.path is None:
            yield Problem("path", "", "is missing: set the folder of the prepared dataset")
        elif is_uri(self.path):
            remedy = "is a URI; a prepared dataset is a folder: prepare raw images instead"
            yield Problem("path", self.path, remedy)
        elif self.options or self.fit:
            field = "options" if self.options else "fit"
            remedy = "does not apply to a prepared dataset; remove it"
            yield Problem(field, getattr(self, field), remedy)
        if self.resize is not None and self.fit != "crop":
            yield Problem("resize", self.resize, "goes with fit: crop")


@settings
class ShapeBiasSuiteSettings(Settings):
    """Shape against texture on conflict stimuli (Geirhos et al. 2019)."""

    path: str
    """Folder with <shape>/<shape><i>-<texture><j>.png."""
    pooling: Pooling = "mean"
    """Of the probabilities of a class's ImageNet indices; `sum` favours dog and bird."""

    def problems(self) -> Iterator[Problem]:
        if problem := uri_problem(self.path):
            yield Problem("path", self.path, problem)


@settings
class TransferSuiteSettings(Settings):
    """Perturbations of each model, evaluated on all models."""

    attacks: Annotated[tuple[TransferKind, ...], MinLen(1)] = ("fgsm", "pgd")
    """Attacks whose images are given to the other models."""
    eps: PositivePixels = 1 / 255
    """Pixels in l-inf: one gray level."""
    num_steps: Count = 8
    """Of PGD, each of size eps / num_steps; FGSM takes one step of eps."""
    resample: Literal["bilinear"] | None = None
    """Resize perturbations between models of different input sizes. None: no result for them."""
    models: dict[Name, str] = dataclasses.field(default_factory=dict)
    """Further models by their folders, e.g. those of other runs."""
    max_items: Count = 1000
    """The first in the order of the subset."""

    def problems(self) -> Iterator[Problem]:
        if len(set(self.attacks)) < len(self.attacks):
            yield Problem("attacks", ", ".join(self.attacks), "names an attack twice")


@settings
class SpatialSuiteSettings(Settings):
    """All rotations and shifts of a grid on every item."""

    grid: SpatialSettings | None = None
    """None: 9 x 9 shifts of up to 16 pixels, or the published 5 x 5 of up to 3 below 64 pixels."""
    chunk_size: Count = 81
    """Poses in one forward pass, of one image."""
    early_exit: bool = True
    """Stop an image at the first chunk that breaks it: the same verdict, but no failure map."""
    max_items: Count = default_of(TransferSuiteSettings, "max_items")
    """The first in the order of the subset."""

    def grid_at(self, side: int) -> SpatialSettings:
        """The grid for images of this side."""
        if self.grid is not None:
            return self.grid
        large = SpatialSettings(max_shift=16.0, num_shifts=9)
        return large if side >= SMALL_SIDE else SpatialSettings()


@settings
class CorruptionSuiteSettings(Settings):
    """Accuracy on corrupted test images, generated or read from a published dataset."""

    names: Literal["all", "benchmark"] | Annotated[tuple[str, ...], MinLen(1)] = "all"
    """Names of corruptions, `benchmark` (15) or `all` (19)."""
    severities: Annotated[tuple[Severity, ...], MinLen(1)] = SEVERITIES
    """Which of the five severities."""
    source: Literal["generate", "imagenet_c", "cifar10_c", "cifar100_c"] = "generate"
    """`generate`: corrupt the prepared items; else stored images of a benchmark."""
    path: str | None = None
    """Folder of the published dataset."""
    fidelity: Fidelity | None = None
    """`released` adds the JPEG files of ImageNet-C. None: released from 64 pixels on, else raw."""
    textures: str | None = None
    """Folder with the photographs frost1 to frost5; None: procedural textures, marked as such."""

    def chosen_names(self) -> tuple[str, ...]:
        """Names of the corruptions in the order of the benchmark."""
        if isinstance(self.names, str):
            return tuple(CORRUPTIONS) if self.names == "all" else BENCHMARK_CORRUPTIONS
        return tuple(name for name in CORRUPTIONS if name in self.names)

    def variants(self) -> tuple[tuple[str, int], ...]:
        """(corruption, severity) in the order of the benchmark."""
        levels = sorted(set(self.severities))
        return tuple((name, level) for name in self.chosen_names() for level in levels)

    def fidelity_at(self, height: int, width: int) -> Fidelity:
        """The fidelity for images of this size; CIFAR-10-C was published without compression."""
        return self.fidelity or ("raw" if min(height, width) < SMALL_SIDE else "released")

    def problems(self) -> Iterator[Problem]:
        for name in () if isinstance(self.names, str) else self.names:
            if name not in CORRUPTIONS:
                yield Problem("names", repr(name), did_you_mean(name, CORRUPTIONS))
        if self.source == "generate":
            if self.path is not None:
                yield Problem("path", self.path, "would be ignored: source is generate; remove it")
            if self.textures is not None and is_uri(self.textures):
                remedy = "is a URI; textures are read from a folder that all machines see"
                yield Problem("textures", self.textures, remedy)
            return
        if self.path is None:
            yield Problem("path", "", f"is missing: set the folder of {self.source}")
        elif problem := uri_problem(self.path):
            yield Problem("path", self.path, problem)
        for field in ("fidelity", "textures"):
            if (value := getattr(self, field)) is not None:
                remedy = f"would be ignored: {self.source} is read, not generated; remove it"
                yield Problem(field, value, remedy)
