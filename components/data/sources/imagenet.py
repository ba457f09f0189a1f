"""ImageNet (ILSVRC-2012) and its published 100-class subset, from folders or from the archives.

`root/train/<wnid>/*.JPEG` and `root/val`, either sorted into class folders or flat with a map; or
the two published archives, which are not unpacked. Labels are positions in a list of WordNet ids
(wnids). The validation images are the test split; items for tuning are held out from train. Their
ids are the same in all layouts.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from components.core.errors import CasemateError, at_key
from components.data.places import Place, place_of
from components.data.sources.base import Entry, Pixels, SourceDefaults
from components.data.sources.files import sub_folders
from components.data.sources.imagenet_parts import (
    ARCHIVES,
    Part,
    decode_part_item,
    find_part,
    read_part_item,
    train_entries,
)
from components.data.sources.imagenet_val import read_val_map
from components.data.sources.names import imagenet100_synsets, imagenet_synsets
from components.data.sources.registry import ROBUSTBENCH

NUM_NAMED = 5  # folders that an error lists
ROBUSTBENCH_FILE = Path(__file__).with_name("robustbench_imagenet.txt")
# SHA-256 of the 5000 names, sorted, one per line (the list of RobustBench, Croce et al. 2021)
ROBUSTBENCH_SHA256 = "1f7d0bdb93c332b850911832011aaa2ce1512c406b44d81e7d4a6877c78502a0"


@dataclass(frozen=True, slots=True)
class ImageNetSource(SourceDefaults):
    """Files below `root`; without training images there is only the test split."""

    name: str
    root: Place
    classes: tuple[str, ...]
    train: Part | None
    val: Part
    val_map: Place | None
    synset_order: Place | None
    test_ids: tuple[str, ...] | None  # file names that the test split is restricted to

    @property
    def test_only(self) -> bool:
        return self.train is None

    @property
    def remarks(self) -> dict[str, str]:
        if self.test_ids is None:
            return {}
        digest = names_sha256(self.test_ids)
        known = "RobustBench's list" if digest == ROBUSTBENCH_SHA256 else "not RobustBench's list"
        # images of other classes are on the list but not in the test split
        used = f"{len(self._test_entries())} of {len(self.test_ids)} images"
        return {"test_ids": f"{used}, {known}, sha256 {digest}"}

    def entries(self) -> list[Entry]:
        if self.train is None:
            return self._test_entries()
        found = train_entries(self.train, self.classes, source=self.name)
        return found + self._test_entries()

    def _test_entries(self) -> list[Entry]:
        label_of = {wnid: label for label, wnid in enumerate(self.classes)}
        images = self._val_images()
        wanted = set(images) if self.test_ids is None else self._checked_ids(images)
        found = [
            Entry(f"{self.name}-val/{name}", label_of[wnid], "test", locator, version)
            for name, (wnid, locator, version) in images.items()
            if name in wanted and wnid in label_of
        ]
        if not found:
            raise CasemateError("data.path", self.val.place, "holds no image of these classes")
        return found

    def _val_images(self) -> dict[str, tuple[str, str, str]]:
        """File name -> wnid, place below root, version."""
        if self.val_map is None:
            images: dict[str, tuple[str, str, str]] = {}
            for wnid, found in self.val.images_of(self.val.class_names()).items():
                for name, locator, version in found:
                    if name in images:
                        place = self.val.place / wnid / name
                        raise CasemateError("data.path", place, "exists twice")
                    images[name] = (wnid, locator, version)
            return dict(sorted(images.items()))
        wnid_of = read_val_map(self.val_map, synset_order=self.synset_order)
        files = self.val.images()
        for name, _, _ in files:
            if name not in wnid_of:
                remedy = f"has no class for {name}"
                raise CasemateError("data.options.val_map", self.val_map, remedy)
        return {name: (wnid_of[name], locator, version) for name, locator, version in files}

    def _checked_ids(self, images: Mapping[str, object]) -> set[str]:
        assert self.test_ids is not None
        missing = [name for name in self.test_ids if name not in images]
        if missing:
            remedy = f"lacks {len(missing)} of the images that options.test_ids names: {missing[0]}"
            raise CasemateError("data.path", self.val.place, remedy)
        return set(self.test_ids)

    def decode(self, entry: Entry) -> Pixels:
        return decode_part_item(self.root, entry)

    def encoded(self, entry: Entry) -> bytes:
        """The file itself, or the archive's member."""
        return read_part_item(self.root, entry)


def open_imagenet(
    root: Place,
    *,
    val_map: str | None = None,
    synset_order: str | None = None,
    test_ids: str | None = None,
    subset: bool = False,
) -> ImageNetSource:
    """The 1000 classes in sorted order; with `subset`, those whose train folder is there.

    Without a train folder, labels are those of the 1000 classes, even if val has fewer.
    """
    every = {wnid: label for label, wnid in enumerate(imagenet_synsets())}
    classes = tuple(every)
    train = find_part(root, "train")
    if train is not None:
        classes = tuple(known_classes(train.place, train.class_names(), every, subset=subset))
    source = _open("imagenet", root, classes, train, val_map, synset_order, test_ids)
    if val_map is None:
        known_classes(source.val.place, source.val.class_names(), every, subset=subset)
    return source


def open_imagenet100(
    root: Place,
    *,
    val_map: str | None = None,
    synset_order: str | None = None,
    test_ids: str | None = None,
) -> ImageNetSource:
    """The 100 classes of Debenedetti et al. 2023; folders of other classes are ignored."""
    classes = imagenet100_synsets()
    train = find_part(root, "train")
    if train is not None:
        _check_present(train.place, train.class_names(), classes)
    source = _open("imagenet100", root, classes, train, val_map, synset_order, test_ids)
    if val_map is None:
        _check_present(source.val.place, source.val.class_names(), classes)
    return source


def _open(
    name: str,
    root: Place,
    classes: tuple[str, ...],
    train: Part | None,
    val_map: str | None,
    synset_order: str | None,
    test_ids: str | None,
) -> ImageNetSource:
    val = find_part(root, "val")
    if val is None:
        remedy = f"lacks the folder val (or the archive {ARCHIVES['val'][0]})"
        raise CasemateError("data.path", root, remedy)
    sorted_into_classes = bool(val.class_names())
    if val_map is None and not sorted_into_classes:
        remedy = (
            "must be set: val is a flat folder; name a file of lines `<image> <wnid>`, "
            "or the devkit's ground truth with options.synset_order"
        )
        raise CasemateError("data.options.val_map", None, remedy)
    if val_map is not None and sorted_into_classes:
        remedy = "would be ignored: val is sorted into class folders; remove it"
        raise CasemateError("data.options.val_map", val_map, remedy)
    if synset_order is not None and val_map is None:
        remedy = "does not apply without data.options.val_map; remove it"
        raise CasemateError("data.options.synset_order", synset_order, remedy)
    return ImageNetSource(
        name,
        root,
        classes,
        train=train,
        val=val,
        val_map=None if val_map is None else place_of(val_map),
        synset_order=None if synset_order is None else place_of(synset_order),
        test_ids=None if test_ids is None else read_test_ids(test_ids),
    )


def known_folders(folder: Place, labels: Mapping[str, int], *, subset: bool) -> list[str]:
    """Class folders in label order; rejects unknown ones, and missing ones unless `subset`."""
    return known_classes(folder, sub_folders(folder), labels, subset=subset)


def known_classes(
    folder: Place, present: Sequence[str], labels: Mapping[str, int], *, subset: bool
) -> list[str]:
    """The classes that a folder has, in label order, checked like `known_folders`."""
    _check_known(folder, [name for name in present if name not in labels])
    if not present:
        raise CasemateError("data.path", folder, "has no class folder")
    if not subset:
        _check_present(folder, present, labels)
    return sorted(present, key=labels.__getitem__)


def _check_known(folder: Place, unknown: Sequence[str]) -> None:
    if len(unknown) == 1:
        raise CasemateError("data.path", folder / unknown[0], "is not a class of this dataset")
    if unknown:
        names = ", ".join(unknown[:NUM_NAMED])
        more = f" and {len(unknown) - NUM_NAMED} more" if len(unknown) > NUM_NAMED else ""
        remedy = f"has folders that are not classes of this dataset: {names}{more}"
        raise CasemateError("data.path", folder, remedy)


def _check_present(folder: Place, there: Iterable[str], names: Iterable[str]) -> None:
    wanted, present = list(names), set(there)
    missing = [name for name in wanted if name not in present]
    if missing:
        found = f"has {len(wanted) - len(missing)} of {len(wanted)} class folders"
        remedy = f"{found}, {missing[0]} is missing; unpack all, or see `casemate data` for options"
        raise CasemateError("data.path", folder, remedy)


def read_test_ids(value: str) -> tuple[str, ...]:
    """File names of the test images: one per line, perhaps after `<wnid>/`; or the bundled list."""
    if value == ROBUSTBENCH:
        return _bundled_ids()
    path, key = place_of(value), "data.options.test_ids"
    try:
        with at_key(key):
            lines = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise CasemateError(key, path, f"is not a readable list of names ({error})") from error
    names = [PurePosixPath(line).name for line in lines]
    if not names:
        raise CasemateError(key, path, "names no image")
    if len(set(names)) < len(names):
        raise CasemateError(key, path, "names an image twice")
    return tuple(names)


def _bundled_ids() -> tuple[str, ...]:
    """RobustBench's 5000 names from the numbers beside this file, checked by digest."""
    key = "data.options.test_ids"
    if not ROBUSTBENCH_FILE.is_file():
        remedy = f"needs the list {ROBUSTBENCH_FILE.name}, which is not installed; name a file"
        raise CasemateError(key, ROBUSTBENCH, remedy)
    numbers = ROBUSTBENCH_FILE.read_text(encoding="utf-8").split()
    names = tuple(f"ILSVRC2012_val_{int(number):08d}.JPEG" for number in numbers)
    if names_sha256(names) != ROBUSTBENCH_SHA256:
        raise CasemateError(key, ROBUSTBENCH_FILE, "is damaged; install it again or name a file")
    return names


def names_sha256(names: Iterable[str]) -> str:
    """SHA-256 of the sorted names, one per line without a last line break."""
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()
