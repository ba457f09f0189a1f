"""What a folder or file of images holds: source, classes, splits, sizes, and what is odd."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from components.core.errors import CasemateError
from components.data.places import place_of
from components.data.sources import open_source
from components.data.sources.base import Entry, Source, UndecodableItemError
from components.data.sources.files import looks_like_image
from components.data.sources.recognition import Recognised
from components.data.splits import SPLITS

MAX_LOOKED_AT = 2000  # images that are decoded by default
SHOWN = 3  # names in a message
LONG_SIDE = 1.5  # times the short side: cropping to a square then loses a third
FEW = 5  # images of a class


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sides of the images that were looked at, in pixels."""

    shapes: Counter[tuple[int, int]]  # (height, width)

    @property
    def uniform(self) -> tuple[int, int] | None:
        """Height and width, if all images have the same."""
        return next(iter(self.shapes)) if len(self.shapes) == 1 else None

    @property
    def square_side(self) -> int | None:
        """The side, if all images are equal squares."""
        height, width = self.uniform or (0, 1)
        return height if height == width else None

    def shorter(self, share: float) -> int:
        """The shorter side that this share of the images does not exceed; 0.5: the median."""
        sides = sorted(min(shape) for shape in self.shapes.elements())
        return sides[min(len(sides) - 1, int(share * len(sides)))]

    @property
    def mean(self) -> tuple[float, float]:
        """Mean height and width."""
        height, width = np.mean(list(self.shapes.elements()), axis=0)
        return float(height), float(width)

    @property
    def aspect(self) -> float:
        """The median of longer over shorter side."""
        return float(np.median([max(shape) / min(shape) for shape in self.shapes.elements()]))


@dataclass(frozen=True, slots=True)
class Inspected:
    """A dataset as it was found; `splits` counts items of native splits, `all` those of none."""

    source: str
    path: str | None
    options: dict[str, Any]
    because: str
    classes: tuple[str, ...]
    splits: dict[str, int]
    test_only: bool
    class_counts: dict[str, int]
    num_looked_at: int
    sizes: Sizes
    channels: tuple[int, ...]  # those that occur
    unreadable: dict[str, str]  # item id -> why
    entries: tuple[Entry, ...] = field(repr=False)
    notices: tuple[str, ...] = ()

    @property
    def num_items(self) -> int:
        return len(self.entries)


def inspect(found: Recognised, *, most: int = MAX_LOOKED_AT) -> Inspected:
    """List all items of a source, and decode at most so many of them, evenly spread."""
    source = open_source(found.source, path=found.path, options=found.options)
    entries = source.entries()
    shapes: Counter[tuple[int, int]] = Counter()
    channels: set[int] = set()
    unreadable: dict[str, str] = {}
    chosen = _spread(entries, most)
    for entry in chosen:
        try:
            height, width, depth = source.decode(entry).shape
        except UndecodableItemError as error:
            unreadable[entry.item_id] = str(error)
            continue
        shapes[height, width] += 1
        channels.add(depth)
    if not shapes:
        raise UndecodableItemError("--data", found.path, _all_damaged(unreadable))
    if len(chosen) == len(entries):
        _check_classes(source, entries, unreadable)
    splits = Counter(entry.split_hint or "all" for entry in entries)
    labels = Counter(entry.label for entry in entries)
    return Inspected(
        source=found.source,
        path=found.path,
        options=found.options,
        because=found.because,
        classes=source.classes,
        splits={name: splits[name] for name in (*SPLITS, "all") if name in splits},
        test_only=source.test_only,
        class_counts={name: labels[label] for label, name in enumerate(source.classes)},
        num_looked_at=len(chosen),
        sizes=Sizes(shapes),
        channels=tuple(sorted(channels)),
        unreadable=unreadable,
        entries=tuple(entries),
        notices=(*found.notices, *_ignored_files(found, source)),
    )


def _spread(entries: Sequence[Entry], most: int) -> list[Entry]:
    """At most so many entries at equal distances; all classes of a sorted listing are met."""
    if len(entries) <= most:
        return list(entries)
    return [entries[i * len(entries) // most] for i in range(most)]


def _check_classes(source: Source, entries: Sequence[Entry], unreadable: dict[str, str]) -> None:
    """Refuse a class of which no image can be read: nothing could be trained on it."""
    readable = {entry.label for entry in entries if entry.item_id not in unreadable}
    for label in sorted({entry.label for entry in entries} - readable):
        remedy = "has no readable image; repair its files or remove its folder"
        raise CasemateError("--data", f"class {source.classes[label]}", remedy)


def _all_damaged(unreadable: dict[str, str]) -> str:
    first = next(iter(unreadable.values()), "it lists no image")
    return f"has no readable image; the first: {first}"


def _ignored_files(found: Recognised, source: Source) -> Iterator[str]:
    """Files of class folders on this disk that are not read as images."""
    if found.source != "folder" or found.path is None:
        return
    root = place_of(found.path)
    others = (p for p in root.rglob("*") if p.is_file() and not looks_like_image(p.name))
    kinds = Counter(p.suffix.lower() or p.name for p in others if not p.name.startswith("."))
    if kinds:
        listed = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())[:SHOWN])
        yield f"{sum(kinds.values())} files are not images: left out ({listed})"


def oddities(found: Inspected) -> list[str]:
    """What is strange about a dataset, one line each; empty if nothing is."""
    return [*found.notices, *_unreadable(found), *_classes(found), *_sizes(found)]


def _unreadable(found: Inspected) -> Iterator[str]:
    looked_at, bad = found.num_looked_at, list(found.unreadable)
    if bad:
        names = _listed(bad)
        yield f"{len(bad)} of {looked_at} images cannot be read and are skipped: {names}"
    if looked_at < found.num_items:
        yield f"{looked_at} of {found.num_items} images were looked at; --look 0 looks at all"


def _classes(found: Inspected) -> Iterator[str]:
    counts = found.class_counts
    if alone := [name for name, count in counts.items() if count == 1]:
        yield f"{_num(alone, 'class has', 'classes have')} 1 image: {_listed(alone)}"
    if few := [f"{name} {count}" for name, count in counts.items() if 1 < count < FEW]:
        yield f"{_num(few, 'class has', 'classes have')} less than {FEW} images: {_listed(few)}"
    if empty := [name for name, count in counts.items() if not count]:
        yield f"{_num(empty, 'class has', 'classes have')} no image: {_listed(empty)}"
    held = [count for count in counts.values() if count]
    if len(held) > 1 and max(held) >= 10 * min(held):
        yield f"classes differ tenfold in size: {min(held)} to {max(held)} images"


def _sizes(found: Inspected) -> Iterator[str]:
    sizes = found.sizes
    if sizes.uniform is None:
        height, width = sizes.mean
        text = f"images have {len(sizes.shapes)} sizes, {height:.0f}x{width:.0f} on average"
        yield f"{text}, {sizes.shorter(0)} to {sizes.shorter(1)} pixels on the shorter side"
    if sizes.aspect > LONG_SIDE:
        text = "half of the images or more are longer than 3:2: a square crop loses their ends"
        yield f"{text}; data.fit: squash keeps them, distorted"
    if len(found.channels) > 1:
        yield "grey and colour images are mixed; grey ones are repeated in three channels"


def _num(names: Sequence[str], one: str, more: str) -> str:
    return f"{len(names)} {one if len(names) == 1 else more}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" * (len(names) > SHOWN))
