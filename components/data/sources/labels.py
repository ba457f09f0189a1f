"""Checks of labels and class names, shared by all sources."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from components.core.errors import CasemateError


def checked_labels(labels: NDArray[Any], *, where: str, num_items: int) -> list[int]:
    """Labels as plain integers >= 0, one per item."""
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        found = f"{labels.dtype} of shape {labels.shape}"
        raise CasemateError("data.path", where, f"holds {found}; labels are a row of integers")
    if len(labels) != num_items:
        raise CasemateError("data.path", where, f"has {len(labels)} labels for {num_items} images")
    if num_items and labels.min() < 0:
        index = int(np.argmax(labels < 0))
        raise CasemateError(
            "data.path", where, f"has label {labels[index]} at {index}; labels start at 0"
        )
    return [int(label) for label in labels]


def check_label_range(labels: list[int], *, where: str, num_classes: int) -> None:
    """Raise an error for labels that are not an index into the classes."""
    for index, label in enumerate(labels):
        if label >= num_classes:
            remedy = f"has label {label} at {index}, but there are {num_classes} classes"
            raise CasemateError("data.path", where, remedy)


def numbered_classes(labels: list[int]) -> tuple[str, ...]:
    """0, 1, ... up to the largest label, for files without class names."""
    return tuple(str(label) for label in range(max(labels, default=0) + 1))


def match_classes(names: tuple[str, ...], *, classes: tuple[str, ...], key: str) -> list[int]:
    """The position of each of `names` in `classes`, to map labels of other images.

    Names are looked up. Plain numbers, from files without class names, are positions.
    """
    known = {name: label for label, name in enumerate(classes)}
    if not set(names) <= set(known) and set(names) == {str(n) for n in range(len(names))}:
        known = {str(label): label for label in range(len(classes))}
    for name in names:
        if name not in known:
            there = ", ".join(classes[:5]) + (", ..." if len(classes) > 5 else "")
            raise CasemateError(key, f"class {name}", f"is not one of the {len(classes)}: {there}")
    return [known[name] for name in names]


def check_class_names(names: tuple[str, ...], *, key: str, where: object) -> None:
    """Raise an error if two classes have the same name."""
    if len(set(names)) < len(names):
        raise CasemateError(key, where, "names a class twice")
