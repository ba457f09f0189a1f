"""Which items a model is right about under one protocol, and whether two such results compare."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal["measured", "attacked", "proven"]
LONGEST = 60  # characters of a value in a reason
UNKNOWN = "unknown"


@dataclass(frozen=True, eq=False, kw_only=True)
class Verdicts:
    """One verdict per item: what two models are compared by. `verdicts_of` sorts by item id."""

    base: str  # e.g. robust.linf
    budget: str  # e.g. 8/255; empty: none
    kind: Kind
    item_ids: tuple[str, ...]
    labels: tuple[object, ...]
    correct: NDArray[Any]  # (N,) bool; or float64, the share of an item's variants
    images: tuple[str, ...] | None = None  # digests of the pixels, if they are recorded
    dataset: str = ""  # its digest, if it is known
    prepared: str = ""  # digest of the prepared files
    conditions: Mapping[str, Any] = field(default_factory=dict)
    """What two results must share, as JSON values; a key that only one has is not compared."""
    step: str = ""
    place: str = ""
    radii: NDArray[np.float64] | None = None
    """(N,) certified l2 radii; negative where the prediction is wrong."""
    defence: str = ""  # what may differ: settings of the smoothed classifier
    doubt: str = ""  # a reason to mark it
    refusal: str = ""  # why it is not compared with anything
    is_part: bool = False  # one of many variants of a suite

    @property
    def figure(self) -> str:
        return f"{self.base}@{self.budget}" if self.budget else self.base

    @property
    def is_binary(self) -> bool:
        return self.correct.dtype == np.bool_

    @property
    def share(self) -> Fraction:
        """The mean of the verdicts; of whole items without rounding."""
        if self.is_binary:
            return Fraction(int(self.correct.sum()), len(self.correct))
        return Fraction(float(self.correct.mean()))

    def is_same(self, other: "Verdicts") -> bool:
        """Whether another result says the same about the same items under the same conditions."""
        equal = ("figure", "kind", "item_ids", "labels", "images", "dataset", "conditions")
        same = all(getattr(self, name) == getattr(other, name) for name in equal)
        return same and np.array_equal(self.correct, other.correct)


def in_order(
    item_ids: Sequence[str], *columns: Sequence[Any] | NDArray[Any]
) -> tuple[tuple[str, ...], list[list[Any]]]:
    """Item ids and further columns, sorted by item id; `ValueError` where an item occurs twice."""
    if len(set(item_ids)) < len(item_ids):
        raise ValueError("an item occurs twice")
    order = sorted(range(len(item_ids)), key=item_ids.__getitem__)
    sorted_columns = [[column[place] for place in order] for column in columns]
    return tuple(item_ids[place] for place in order), sorted_columns


def reasons_against(names: tuple[str, str], one: Verdicts, other: Verdicts) -> list[str]:
    """Why two results of models with these names do not compare; empty: they do."""
    refused = [f"{n}: {v.refusal}" for n, v in zip(names, (one, other), strict=True) if v.refusal]
    if refused:
        return refused
    return [*_conditions(names, one, other), *_items(names, one, other)]


def _conditions(names: tuple[str, str], one: Verdicts, other: Verdicts) -> Iterator[str]:
    for key in sorted(one.conditions.keys() & other.conditions.keys()):
        for place, left, right in differences(one.conditions[key], other.conditions[key]):
            what = f"{key}{place}".replace("_", " ")
            yield f"other {what}: {names[0]} {_short(left)}, {names[1]} {_short(right)}"
            break  # the first difference of each is enough


def differences(one: Any, other: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Where two JSON values differ: the place, and both values there."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in sorted(one.keys() | other.keys()):
            yield from differences(one.get(key), other.get(key), f"{place} {key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, pair in enumerate(zip(one, other, strict=True), start=1):
            yield from differences(*pair, f"{place} {number}")
    elif one != other:
        yield place, one, other


def _short(value: Any) -> str:
    if isinstance(value, list):
        text = ", ".join(_short(v) for v in value) or "none"
    elif isinstance(value, Mapping):
        text = str(value.get("kind", dict(value)))
    else:
        text = "none" if value is None else str(value)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _items(names: tuple[str, str], one: Verdicts, other: Verdicts) -> Iterator[str]:
    """Other datasets, items, pixels or labels: the first of these."""
    pixels_known = one.images is not None and other.images is not None
    if not pixels_known and (why := _other_dataset(names, one, other)):
        yield why
    elif missing := sorted(set(one.item_ids) ^ set(other.item_ids)):
        counts = f"{names[0]} has {len(one.item_ids)}, {names[1]} {len(other.item_ids)}"
        yield f"other items: {counts}; {len(missing)} are in one only, e.g. {missing[0]}"
    elif place := _first(one.images or (), other.images or ()) if pixels_known else None:
        yield f"other images: {one.item_ids[place - 1]} has other pixels"
    elif place := _first(one.labels, other.labels):
        labels = f"{names[0]} {one.labels[place - 1]}, {names[1]} {other.labels[place - 1]}"
        yield f"other labels: of {one.item_ids[place - 1]}: {labels}"


def _other_dataset(names: tuple[str, str], one: Verdicts, other: Verdicts) -> str:
    for known in ("dataset", "prepared"):
        left, right = getattr(one, known), getattr(other, known)
        if left and right:
            same = left == right
            both = f"{names[0]} {left[:12]}, {names[1]} {right[:12]}"
            return "" if same else f"other dataset: digests {both}"
    lacking = [n for n, v in zip(names, (one, other), strict=True) if not v.dataset]
    return f"the dataset of {' and '.join(lacking)} is unknown"


def _first(left: Sequence[object], right: Sequence[object]) -> int | None:
    """The number, from 1, of the first difference of two equally long sequences."""
    pairs: Iterable[tuple[object, object]] = zip(left, right, strict=True)
    return next((n for n, (a, b) in enumerate(pairs, start=1) if a != b), None)
