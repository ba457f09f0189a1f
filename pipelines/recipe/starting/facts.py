"""What a first recipe starts from: the user's images, their size for a network, their splits."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from components.core.errors import CasemateError
from components.data.inspection import Inspected
from components.data.splits import assign_splits
from components.models.spec import ModelSpec
from pipelines.recipe.commented import Said

Task = Literal["attack", "certify", "train", "tune"]
TASKS = get_args(Task)
DIGITS = ("digits", "mnist5k", "mnist", "fashion_mnist")  # whose pixels are nearly black or white
FRACTIONS = ((0.1, 0.2), (0.2, 0.2), (0.25, 0.25), (0.3, 0.3))  # of val and test
PHOTO = 160  # shorter side from which images are photographs for a network of 224 px
LARGE, LARGE_RESIZE = 224, 256
SMALLEST = 8


class Fitted(NamedTuple):
    """How images come to one size: keys of the data section, and why."""

    image_size: int
    fit: str
    resize: int | None
    why: str


@dataclass(frozen=True, slots=True)
class Start:
    """What the choices depend on: the images, and a given model if there is one."""

    task: Task
    data: Inspected
    fitted: Fitted
    splits: Mapping[str, int]
    fractions: tuple[float, float]  # of val and test, if the data has no such split
    folder: str | None = None  # of a given model
    spec: ModelSpec | None = None

    @property
    def side(self) -> int:
        return self.fitted.image_size

    @property
    def is_large(self) -> bool:
        return self.side >= PHOTO

    @property
    def num_train(self) -> int:
        return self.splits["train"]

    @property
    def channels(self) -> int:
        if self.spec is not None:
            return self.spec.channels
        return 3 if self.is_large else max(self.data.channels)

    @property
    def is_photos(self) -> bool:
        """Whether flipped and shifted images plausibly have the same label."""
        return max(self.data.channels) == 3

    @property
    def eps(self) -> Said:
        """The usual budget."""
        if self.data.source in DIGITS or (max(self.data.channels) == 1 and self.side <= 32):
            return Said(0.1, "usual for small grey images such as digits; pixels are in [0, 1]")
        if self.is_large:
            return Said("4/255", "usual for 224 px (Debenedetti et al. 2023, Salman et al. 2020)")
        return Said("8/255", "usual for small colour images (RobustBench, CIFAR-10)")


def start(task: Task, data: Inspected) -> Start:
    """What a recipe that trains its own models starts from."""
    if data.test_only:
        remedy = f"has test images only, so nothing can be trained; {task} needs --model"
        raise CasemateError("--data", data.path or data.source, remedy)
    fractions, splits = _splits(data)
    return Start(task, data, _fitted(data), splits, fractions)


def start_from_model(task: Task, data: Inspected, *, folder: str, spec: ModelSpec) -> Start:
    """What a recipe about a given model starts from: images as that model takes them."""
    spec.check_classes(len(data.classes))
    side, sizes = spec.image_size, data.sizes
    if sizes.square_side == side:
        fitted = Fitted(side, "pad", None, "all images have the model's size")
    elif side >= PHOTO and sizes.shorter(0.5) >= PHOTO:
        resize = max(side, round(side * LARGE_RESIZE / LARGE))
        fitted = Fitted(side, "crop", resize, "the centre, as published ImageNet accuracies use it")
    else:
        fitted = Fitted(side, "resize", None, "the central square, scaled to the model's size")
    if data.test_only:
        return Start(task, data, fitted, dict(data.splits), FRACTIONS[0], folder, spec)
    fractions, splits = _splits(data)
    return Start(task, data, fitted, splits, fractions, folder, spec)


def _splits(data: Inspected) -> tuple[tuple[float, float], dict[str, int]]:
    """Shares of val and test that leave no split empty, and the items of each split."""
    for val, test in FRACTIONS:
        try:
            split = assign_splits(
                data.entries,
                classes=data.classes,
                seed=0,
                val_fraction=val,
                test_fraction=test,
                limits={},
            )
        except CasemateError as error:
            if (val, test) == FRACTIONS[-1] or "_fraction" not in error.key:
                raise CasemateError("--data", data.path or data.source, _too_few(data)) from error
            continue
        return (val, test), {name: len(entries) for name, entries in split.items()}
    raise AssertionError


def _too_few(data: Inspected) -> str:
    name, count = min(data.class_counts.items(), key=lambda pair: pair[1])
    return (
        f"has too few images to train, validate and test: {data.num_items} in "
        f"{len(data.classes)} classes, {count} in class {name}; add images"
    )


def _fitted(data: Inspected) -> Fitted:
    """Size and fit of images for a new network."""
    sizes, side = data.sizes, data.sizes.square_side
    if side is not None and side < PHOTO:
        patch = patch_of(side)
        tiled = max(SMALLEST, -(-side // patch) * patch)
        if tiled == side:
            return Fitted(side, "pad", None, f"all images are {side}x{side}: nothing is changed")
        return Fitted(tiled, "pad", None, f"{side}x{side} in a black border: {patch}-pixel patches")
    middle = sizes.shorter(0.5)
    if side == LARGE:
        return Fitted(LARGE, "pad", None, "all images are 224x224: nothing is changed")
    if middle >= PHOTO:
        why = "the centre after scaling the shorter side, as ImageNet's accuracies are published"
        return Fitted(LARGE, "crop", LARGE_RESIZE, why)
    patch = patch_of(middle)
    tiled = max(SMALLEST, middle // patch * patch)
    return Fitted(tiled, "resize", None, "the central square, scaled: near the median side")


def patch_of(side: int) -> int:
    """The patch side of a small network: 4x4 to 20x20 tokens."""
    return next((patch for patch, most in ((2, 12), (4, 48), (8, PHOTO - 1)) if side <= most), 16)


def doubts(begun: Start) -> list[str]:
    """What the recipe cannot mend: the model does not suit the task, or classes are many."""
    found = []
    kind = (begun.spec.trained_for or {}).get("kind") if begun.spec else None
    known = ("columns", "ablation", "gaussian")
    if begun.task == "certify" and begun.spec is not None and kind not in known:
        text = "the model was trained neither on noise nor on ablations: expect few certificates"
        found.append(text)
    return found
