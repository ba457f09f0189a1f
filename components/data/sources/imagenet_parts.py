"""The two parts of ImageNet, train and val: unpacked folders, or the published archives.

`ILSVRC2012_img_train.tar` holds an archive per class, `ILSVRC2012_img_val.tar` the images. Ids of
items do not depend on the form. A folder counts if both are there.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from components.core.errors import CasemateError
from components.data.places import Place
from components.data.sources.archives import Member, inner_members, members, read_member
from components.data.sources.base import Entry, Pixels
from components.data.sources.files import (
    decode_image_bytes,
    flat_images,
    looks_like_image,
    no_images,
    sub_folders,
)
from components.data.sources.versions import file_bytes, file_version

THREADS = 16  # requests at a time while objects or archives are listed
ARCHIVES = {
    "train": ("ILSVRC2012_img_train.tar", "train.tar"),
    "val": ("ILSVRC2012_img_val.tar", "val.tar"),
}


class Image(NamedTuple):
    """An image of a part."""

    name: str
    locator: str
    version: str


@dataclass(frozen=True, slots=True)
class Part:
    """A folder, or an archive of that version, below `root`."""

    root: Place
    name: str
    version: str | None

    @property
    def place(self) -> Place:
        return self.root / self.name

    def class_names(self) -> list[str]:
        """The classes that it is sorted into, sorted; none if its images lie side by side."""
        if self.version is None:
            return sub_folders(self.place)
        return sorted(self._inner(self.version))

    def images_of(self, wnids: Sequence[str]) -> dict[str, list[Image]]:
        """The images of each class, sorted by name; several requests at a time."""
        if self.version is None and isinstance(self.root, Path):
            return {wnid: self._class_images(wnid) for wnid in wnids}
        if self.version is not None:
            members(self.place, self.version)  # once, not by every thread
        with ThreadPoolExecutor(THREADS) as threads:
            return dict(zip(wnids, threads.map(self._class_images, wnids), strict=True))

    def _class_images(self, wnid: str) -> list[Image]:
        if self.version is None:
            below = f"{self.name}/{wnid}"
            return [Image(n, f"{below}/{n}", v) for n, v in flat_images(self.place / wnid)]
        inner = self._inner(self.version)[wnid]
        return self._archived(inner_members(self.place, self.version, inner), self.version)

    def images(self) -> list[Image]:
        """The images that are not in a class, sorted by name."""
        if self.version is None:
            return [Image(n, f"{self.name}/{n}", v) for n, v in flat_images(self.place)]
        return self._archived(members(self.place, self.version), self.version)

    def _inner(self, version: str) -> dict[str, Member]:
        """The archive of each class."""
        names = ((m.name.rpartition("/")[2], m) for m in members(self.place, version))
        return {name.removesuffix(".tar"): m for name, m in names if name.endswith(".tar")}

    def _archived(self, files: tuple[Member, ...], version: str) -> list[Image]:
        found: dict[str, Image] = {}
        for member in files:
            name = member.name.rpartition("/")[2]
            if not looks_like_image(name):
                continue
            if name in found:
                raise CasemateError("data.path", f"{self.place} [{member.name}]", "exists twice")
            found[name] = Image(name, member.locator(self.name), version)
        return [found[name] for name in sorted(found)]


def find_part(root: Place, name: str) -> Part | None:
    """The folder `name`, else its archive; None if neither is there."""
    if (root / name).is_dir():
        return Part(root, name, version=None)
    for archive in ARCHIVES[name]:
        if (root / archive).is_file():
            return Part(root, archive, file_version(root / archive))
    return None


def train_entries(part: Part, classes: Sequence[str], *, source: str) -> list[Entry]:
    """The training images of all classes, of each at least one."""
    found: list[Entry] = []
    for label, (wnid, images) in enumerate(part.images_of(classes).items()):
        if not images:
            raise no_images(part.place / wnid)
        found += [
            Entry(f"{source}-train/{wnid}/{name}", label, "train", locator, version)
            for name, locator, version in images
        ]
    return found


def decode_part_item(root: Place, entry: Entry) -> Pixels:
    """Pixels of an image in a folder or in an archive."""
    where = entry.item_id if ".tar:" in entry.locator else str(root / entry.locator)
    return decode_image_bytes(read_part_item(root, entry), where=where)


def read_part_item(root: Place, entry: Entry) -> bytes:
    """The encoded image in a folder or in an archive."""
    if ".tar:" not in entry.locator:
        return file_bytes(root / entry.locator)
    return read_member(root, entry.locator, entry.version)
