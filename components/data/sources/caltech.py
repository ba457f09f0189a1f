"""Caltech-101 (Fei-Fei et al. 2004): one folder per category, and one of background clutter.

With the clutter there are 102 classes, the form that TensorFlow Datasets ships and that published
robustness figures use. Classes are ordered as there: by name, ignoring case.
"""

from dataclasses import dataclass

from components.core.digests import digest_bytes
from components.core.errors import CasemateError
from components.data.places import Place
from components.data.sources.base import Entry, Pixels, SourceDefaults
from components.data.sources.files import (
    class_entries,
    decode_image_file,
    first_folder,
    sub_folders,
)

_IMAGES = "101_ObjectCategories"
_BACKGROUND = "BACKGROUND_Google"
_NUM_CATEGORIES = 101


@dataclass(frozen=True, slots=True)
class CaltechSource(SourceDefaults):
    """Folders of images below `root`."""

    root: Place
    classes: tuple[str, ...]
    train_per_class: int | None

    def entries(self) -> list[Entry]:
        found: list[Entry] = []
        for label, name in enumerate(self.classes):
            entries = class_entries(self.root, name, source="caltech101", label=label, split=None)
            found += self._with_splits(name, entries)
        return found

    def _with_splits(self, name: str, entries: list[Entry]) -> list[Entry]:
        """Train entries: the first `train_per_class` by hash, independent of the listing order."""
        if self.train_per_class is None:
            return entries
        if len(entries) <= self.train_per_class:
            remedy = f"is too large: {name} has {len(entries)} images and needs some for testing"
            raise CasemateError("data.options.train_per_class", self.train_per_class, remedy)
        ranked = sorted(entries, key=lambda entry: digest_bytes(entry.item_id.encode()))
        train = {entry.item_id for entry in ranked[: self.train_per_class]}
        return [
            Entry(
                e.item_id, e.label, "train" if e.item_id in train else "test", e.locator, e.version
            )
            for e in entries
        ]

    def decode(self, entry: Entry) -> Pixels:
        return decode_image_file(self.root / entry.locator)


def open_caltech101(
    root: Place, *, background: bool = True, train_per_class: int | None = 30
) -> CaltechSource:
    """All categories; 30 training images per class is the usual protocol, null leaves one split."""
    if train_per_class is not None and train_per_class < 1:
        raise CasemateError("data.options.train_per_class", train_per_class, "must be at least 1")
    home = first_folder(root, ("", "caltech101", "caltech-101"), wanted=_IMAGES) / _IMAGES
    names = sorted(sub_folders(home), key=lambda name: (name.lower(), name))
    if _BACKGROUND in names and not background:
        names.remove(_BACKGROUND)
    wanted = _NUM_CATEGORIES + background
    if len(names) != wanted or (background and _BACKGROUND not in names):
        remedy = f"has {len(names)} class folders, expected {wanted}"
        if background and _BACKGROUND not in names:
            remedy += f" with {_BACKGROUND}; data.options.background=false leaves it out"
        raise CasemateError("data.path", home, remedy)
    return CaltechSource(home, tuple(names), train_per_class)
