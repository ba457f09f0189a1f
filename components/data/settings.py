"""Settings of the data: which images, how they are split, fitted and augmented."""

from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from components.core import user_code
from components.core.errors import CasemateError
from components.core.hints import did_you_mean
from components.core.settings import (
    Count,
    Later,
    NonNegative,
    Problem,
    Settings,
    Share,
    Side,
    default_of,
    settings,
)
from components.data.sources.info import path_problem
from components.data.sources.registry import SOURCE_NAMES, find_source

Fraction = Annotated[float, Gt(0), Lt(1)]
Fit = Literal["pad", "resize", "crop", "squash"]


def source_problems(source: str, path: str | None) -> Iterator[Problem]:
    """Problems of an unknown source, a missing path or a path that would be ignored."""
    try:
        info = find_source(source)
    except CasemateError:
        yield Problem("source", repr(source), did_you_mean(source, SOURCE_NAMES))
        return
    wanted = info.path
    if wanted == "none" and path is not None:
        yield Problem("path", path, "would be ignored: this source is embedded; remove it")
    if wanted == "needed" and path is None:
        yield Problem("path", "", "is missing: this source reads files; set their folder or file")
    if wanted != "none" and (problem := path_problem(info, path)):
        yield Problem("path", path, problem)


@settings
class SyntheticSettings(Settings):
    """Generated training images, mixed into every batch at equal batch size."""

    source: str = "npz"
    """Where the generated images come from; a name that `casemate data` lists."""
    path: str | None = None
    """Files of the source."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the source."""
    ratio: Fraction = 0.5
    """Share of every batch that is generated."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", user_code.pinned(self.source, field="source"))
        Settings.__post_init__(self)

    def problems(self) -> Iterator[Problem]:
        return source_problems(self.source, self.path)


@settings
class DataSettings(Settings):
    """Which images, how they are split and fitted to one size; `casemate data` lists sources."""

    source: str
    """A name that `casemate data` lists, or `python:FILE.py:NAME`."""
    path: str | None = None
    """Folder, file or dataset root, as the source expects it."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the source, e.g. severity."""
    image_size: Side | None = None
    """Side in pixels; None: as stored, if all items have one size."""
    fit: Fit = "pad"
    """`resize` and `crop` keep the aspect ratio, `squash` does not."""
    resize: Side | None = None
    """Short side before `fit: crop`; None: image_size."""
    train_size: Side | None = None
    """Stored side of training images, for random crops."""
    channels: Literal[1, 3] | None = None
    """None: as in the source."""
    split_seed: Annotated[int, Ge(0)] = 0
    """Seed of the splits, independent of the recipe's seed: test items stay test items."""
    val_fraction: Fraction = 0.1
    """Share of validation items if the source has no val split."""
    test_fraction: Fraction = 0.2
    """Share of test items if the source has no test split."""
    limits: dict[Literal["train", "val", "test", "synthetic"], Count] = field(default_factory=dict)
    """Items of each split at most, e.g. {train: 1000}."""
    on_error: Literal["fail", "skip"] = "fail"
    """What happens to images that cannot be read; `skip` leaves them out and counts them."""
    shard_size: Count = 1024
    """Items in one file of the prepared dataset."""
    synthetic: SyntheticSettings | None = None
    """Generated images, mixed into every training batch."""
    train_format: Annotated[Literal["png", "jpeg", "raw"], Later()] = "png"
    """How training images are stored; val and test items are always PNG. `jpeg` is small and fast,
    but not exact; files of the source that are JPEG of the stored size are kept. `raw` is large and
    needs no decoding."""
    train_quality: Annotated[int, Ge(1), Le(100), Later()] = 95
    """Quality of `train_format: jpeg`, with colours at full resolution."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", user_code.pinned(self.source, field="source"))
        Settings.__post_init__(self)

    def problems(self) -> Iterator[Problem]:
        yield from source_problems(self.source, self.path)
        if self.val_fraction + self.test_fraction >= 1:
            shares = f"{self.val_fraction:g} + test_fraction {self.test_fraction:g}"
            yield Problem("val_fraction", shares, "leave nothing to train on")
        if self.train_format != "jpeg" and self.train_quality != default_of(
            DataSettings, "train_quality"
        ):
            remedy = f"would be ignored with train_format: {self.train_format}; remove it"
            yield Problem("train_quality", self.train_quality, remedy)


@settings
class AugmentSettings(Settings):
    """Random changes of training images; off by default."""

    crop: Literal["none", "pad", "resized"] = "none"
    """`pad`: a random window of the padded image; `resized`: a random part, resized."""
    pad: Annotated[int, Ge(0)] = 0
    """Pixels on each side, for crop: pad."""
    scale: tuple[float, float] = (0.08, 1.0)
    """Share of the area, for crop: resized."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Width over height, for crop: resized."""
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    """Of resized crops."""
    flip: bool = False
    """Mirror half of the images."""
    jitter: NonNegative = 0.0
    """Brightness, contrast and saturation are multiplied by 1 +- this."""
    rotation: Annotated[float, Ge(0), Le(180)] = 0.0
    """Largest rotation in degrees, in both directions."""
    rand_augment: str | None = None
    """timm's notation, e.g. rand-m9-mstd0.5-inc1."""
    erase_prob: Share = 0.0
    """Random erasing."""
    mixup: NonNegative = 0.0
    """alpha; 0 is off."""
    cutmix: NonNegative = 0.0
    """alpha; 0 is off."""
    mix_prob: Annotated[float, Gt(0), Le(1)] = 1.0
    """Probability that a batch is mixed."""
    mix_switch: Share = 0.5
    """Probability of CutMix if both are on."""
    mix_mode: Literal["batch", "pair"] = "batch"
    """One lambda per global batch, or per pair."""
    copies: Count = 1
    """Copies of an item per batch, augmented independently."""
    clean_copy: bool = False
    """The first copy of each item is not augmented."""

    @property
    def mixes(self) -> bool:
        """Whether images and labels are blended by MixUp or CutMix."""
        return bool(self.mixup or self.cutmix)

    def problems(self) -> Iterator[Problem]:
        if (self.crop == "pad") != (self.pad > 0):
            yield Problem("pad", self.pad, "must be positive with crop: pad and 0 otherwise")
        if self.clean_copy and self.copies < 2:
            yield Problem("clean_copy", True, "needs copies: 2 or more")
        for name, (low, high) in (("scale", self.scale), ("ratio", self.ratio)):
            if not 0 < low <= high:
                remedy = "is not a pair of positive numbers, the smaller one first"
                yield Problem(name, [low, high], remedy)
        if self.scale[1] > 1:
            yield Problem("scale", list(self.scale), "is a share of the image area, at most 1")
