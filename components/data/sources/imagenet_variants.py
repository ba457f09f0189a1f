"""Test sets for ImageNet classifiers: R, A, V2, Sketch and C, all in the 1000-class label space.

Folders name classes: by wnid, or in V2 by the class number (alphabetic order is not numeric order).
R and A hold 200 of the 1000 classes; labels stay those of the 1000.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from components.data.places import Place
from components.data.sources.base import Entry, Pixels, SourceDefaults
from components.data.sources.corrupted import Variant, check_variants, chosen_variants
from components.data.sources.files import class_entries, decode_image_file, sub_folders
from components.data.sources.imagenet import known_folders
from components.data.sources.names import (
    CORRUPTIONS,
    SEVERITIES,
    imagenet_a_synsets,
    imagenet_r_synsets,
    imagenet_synsets,
)


@dataclass(frozen=True, slots=True)
class ImageNetTestSource(SourceDefaults):
    """Folders of test images below `root`, each with the label of all its images."""

    name: str
    root: Place
    classes: tuple[str, ...]  # the 1000 wnids
    folders: tuple[tuple[str, int], ...]  # (place below root, label)

    @property
    def test_only(self) -> bool:
        return True

    def entries(self) -> list[Entry]:
        return [
            entry
            for place, label in self.folders
            for entry in class_entries(
                self.root, place, source=self.name, label=label, split="test"
            )
        ]

    def decode(self, entry: Entry) -> Pixels:
        return decode_image_file(self.root / entry.locator)


def open_imagenet_r(root: Place, *, subset: bool = False) -> ImageNetTestSource:
    """ImageNet-R: renditions of 200 classes (Hendrycks et al. 2021)."""
    return _open("imagenet_r", root, _labels_of(imagenet_r_synsets()), subset)


def open_imagenet_a(root: Place, *, subset: bool = False) -> ImageNetTestSource:
    """ImageNet-A: natural adversarial examples of 200 classes (Hendrycks et al. 2021)."""
    return _open("imagenet_a", root, _labels_of(imagenet_a_synsets()), subset)


def open_imagenet_sketch(root: Place, *, subset: bool = False) -> ImageNetTestSource:
    """ImageNet-Sketch: drawings of all classes (Wang et al. 2019)."""
    return _open("imagenet_sketch", root, _labels_of(imagenet_synsets()), subset)


def open_imagenet_v2(root: Place, *, subset: bool = False) -> ImageNetTestSource:
    """ImageNet-V2, one of its three variants: the folder's name is the class number."""
    return _open("imagenet_v2", root, {str(label): label for label in range(1000)}, subset)


def open_imagenet_c(
    root: Place, *, corruption: str | list[str], severity: int | str, subset: bool = False
) -> ImageNetTestSource:
    """ImageNet-C: `<corruption>/<severity>/<wnid>`, perhaps below a folder per group."""
    variants = chosen_variants(corruption, severity)
    places = imagenet_c_places(root)
    check_variants(root, variants, present=places)
    labels = _labels_of(imagenet_synsets())
    folders = tuple(
        (f"{places[variant]}/{wnid}", labels[wnid])
        for variant in variants
        for wnid in known_folders(root / places[variant], labels, subset=subset)
    )
    return ImageNetTestSource("imagenet_c", root, imagenet_synsets(), folders)


def imagenet_c_places(root: Place) -> dict[Variant, str]:
    """The variants of an ImageNet-C folder that are there, each with its place below root."""
    homes = _corruption_homes(root)
    return {
        (name, level): f"{homes[name]}/{level}"
        for name in CORRUPTIONS
        for level in SEVERITIES
        if name in homes and (root / homes[name] / str(level)).is_dir()
    }


def _open(name: str, root: Place, labels: Mapping[str, int], subset: bool) -> ImageNetTestSource:
    folders = tuple((wnid, labels[wnid]) for wnid in known_folders(root, labels, subset=subset))
    return ImageNetTestSource(name, root, imagenet_synsets(), folders)


def _labels_of(wnids: tuple[str, ...]) -> dict[str, int]:
    place = {wnid: label for label, wnid in enumerate(imagenet_synsets())}
    return {wnid: place[wnid] for wnid in wnids}


def _corruption_homes(root: Place) -> dict[str, str]:
    """Corruption -> its place below root: at the top, or inside a group such as `noise`."""
    homes: dict[str, str] = {}
    for name in sub_folders(root):
        if name in CORRUPTIONS:
            homes[name] = name
        else:
            inner = [below for below in sub_folders(root / name) if below in CORRUPTIONS]
            homes |= {below: f"{name}/{below}" for below in inner}
    return homes
