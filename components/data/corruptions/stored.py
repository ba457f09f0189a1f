"""Published corrupted datasets read variant by variant, where some may be missing.

Layouts are those of the sources: ImageNet-C `<corruption>/<severity>/<wnid>/*`, perhaps below a
folder per group; CIFAR-10-C and CIFAR-100-C `<corruption>.npy` with `labels.npy`.
"""

from collections.abc import Sequence
from typing import Any

from components.core.errors import CasemateError
from components.data.places import Place
from components.data.sources import open_source
from components.data.sources.base import Entry, Source
from components.data.sources.corrupted import CorruptedCifarSource, Variant, cifar_c_variants
from components.data.sources.imagenet_variants import imagenet_c_places
from components.data.sources.labels import match_classes
from components.data.sources.names import CIFAR10, CIFAR100, SEVERITIES, imagenet_synsets

IMAGENET_C = "imagenet_c"
SIDE = 224  # of the images of ImageNet-C


def stored_variants(source: str, root: Place) -> list[Variant]:
    """The variants of a dataset that are there, in the order of the benchmark."""
    found = list(imagenet_c_places(root)) if source == IMAGENET_C else cifar_c_variants(root)
    if not found:
        wanted = "<corruption>/<severity>/<wnid>" if source == IMAGENET_C else "<corruption>.npy"
        raise CasemateError("data.path", root, f"holds no corruption; expected {wanted}")
    return found


def check_arrays(source: str, root: Place) -> None:
    """Refuse arrays of CIFAR-C whose size does not fit the labels."""
    if source == IMAGENET_C:
        return
    for name in dict.fromkeys(name for name, _ in stored_variants(source, root)):
        opened = open_variant(source, root, (name, SEVERITIES[0]))
        assert isinstance(opened, CorruptedCifarSource)
        opened.check()


def labels_among(source: str, classes: Sequence[str]) -> list[int]:
    """The place of each class of a published dataset among `classes`: by name.

    Where `classes` are plain numbers, as of files without class names, by position.
    """
    names = {"cifar10_c": CIFAR10, "cifar100_c": CIFAR100}.get(source) or imagenet_synsets()
    if list(classes) == [str(number) for number in range(len(names))]:
        return list(range(len(names)))
    return match_classes(names, classes=tuple(classes), key="corruptions.source")


def in_words(variants: Sequence[Variant]) -> str:
    """`fog, snow/2, snow/3`: a corruption without severities stands for all five."""
    levels: dict[str, list[int]] = {}
    for name, level in variants:
        levels.setdefault(name, []).append(level)
    return ", ".join(
        name if sorted(found) == list(SEVERITIES) else ", ".join(f"{name}/{n}" for n in found)
        for name, found in levels.items()
    )


def image_ids(variant: Variant, entries: Sequence[Entry]) -> list[str]:
    """The names of the images that were corrupted: equal in all variants of a dataset."""
    name, severity = variant
    found = []
    for entry in entries:
        _, between, below = entry.item_id.partition(f"{name}/{severity}/")  # ImageNet-C
        found.append(below if between else entry.item_id.rpartition("-")[2])
    return found


def open_variant(source: str, root: Place, variant: Variant, *, subset: bool = False) -> Source:
    """One variant as a source; `subset` allows missing classes of ImageNet-C."""
    name, severity = variant
    options: dict[str, Any] = {"corruption": name, "severity": severity}
    if source == IMAGENET_C:
        options["subset"] = subset
    return open_source(source, path=str(root), options=options)
