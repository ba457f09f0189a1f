"""Published corrupted datasets read variant by variant, where some may be missing.

Layouts are those of the sources: ImageNet-C `<corruption>/<severity>/<wnid>/*`, perhaps below a
folder per group; CIFAR-10-C and CIFAR-100-C `<corruption>.npy` with `labels.npy`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from components.core.errors import CasemateError
from components.data.sources import open_source
from components.data.sources.base import Entry, Source
from components.data.sources.corrupted import Variant, cifar_c_variants
from components.data.sources.imagenet_variants import imagenet_c_places

IMAGENET_C = "imagenet_c"


def stored_variants(source: str, root: Path) -> list[Variant]:
    """The variants of a dataset that are there, in the order of the benchmark."""
    found = list(imagenet_c_places(root)) if source == IMAGENET_C else cifar_c_variants(root)
    if not found:
        wanted = "<corruption>/<severity>/<wnid>" if source == IMAGENET_C else "<corruption>.npy"
        raise CasemateError("data.path", root, f"holds no corruption; expected {wanted}")
    return found


def image_ids(variant: Variant, entries: Sequence[Entry]) -> list[str]:
    """The names of the images that were corrupted: equal in all variants of a dataset."""
    name, severity = variant
    found = []
    for entry in entries:
        _, between, below = entry.item_id.partition(f"{name}/{severity}/")  # ImageNet-C
        found.append(below if between else entry.item_id.rpartition("-")[2])
    return found


def open_variant(source: str, root: Path, variant: Variant, *, subset: bool = False) -> Source:
    """One variant as a source; `subset` allows missing classes of ImageNet-C."""
    name, severity = variant
    options: dict[str, Any] = {"corruption": name, "severity": severity}
    if source == IMAGENET_C:
        options["subset"] = subset
    return open_source(source, path=str(root), options=options)
