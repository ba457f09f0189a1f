"""The two parts of ImageNet, train and val: unpacked folders, or the published archives.

`ILSVRC2012_img_train.tar` holds an archive per class, `ILSVRC2012_img_val.tar` the images. Ids of
items do not depend on the form. A folder counts if both are there.
"""

from dataclasses import dataclass
from typing import NamedTuple

from components.core.errors import CasemateError
from components.data.places import Place
from components.data.sources.archives import Member, members, nested_members, read_member
from components.data.sources.base import Entry, Pixels
from components.data.sources.files import (
    decode_image_bytes,
    decode_image_file,
    flat_images,
    looks_like_image,
    no_images,
    sub_folders,
)
from components.data.sources.versions import file_version

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
    """A folder or an archive below `root`."""

    root: Place
    name: str
    is_archive: bool

    @property
    def place(self) -> Place:
        return self.root / self.name

    def class_names(self) -> list[str]:
        """The classes that it is sorted into, sorted; none if its images lie side by side."""
        if not self.is_archive:
            return sub_folders(self.place)
        files = members(self.place, file_version(self.place))
        return (
            sorted(nested_members(self.place, file_version(self.place))) if _nested(files) else []
        )

    def class_images(self, wnid: str) -> list[Image]:
        """The images of a class, sorted by name."""
        if not self.is_archive:
            below = f"{self.name}/{wnid}"
            return [Image(n, f"{below}/{n}", v) for n, v in flat_images(self.place / wnid)]
        version = file_version(self.place)
        return self._archived(nested_members(self.place, version)[wnid], version)

    def images(self) -> list[Image]:
        """The images that are not in a class, sorted by name."""
        if not self.is_archive:
            return [Image(n, f"{self.name}/{n}", v) for n, v in flat_images(self.place)]
        version = file_version(self.place)
        return self._archived(members(self.place, version), version)

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


def _nested(files: tuple[Member, ...]) -> bool:
    return any(member.name.endswith(".tar") for member in files)


def find_part(root: Place, name: str) -> Part | None:
    """The folder `name`, else its archive; None if neither is there."""
    if (root / name).is_dir():
        return Part(root, name, is_archive=False)
    for archive in ARCHIVES[name]:
        if (root / archive).is_file():
            return Part(root, archive, is_archive=True)
    return None


def train_entries(part: Part, wnid: str, *, source: str, label: int) -> list[Entry]:
    """The training images of one class, at least one."""
    images = part.class_images(wnid)
    if not images:
        raise no_images(part.place / wnid)
    return [
        Entry(f"{source}-train/{wnid}/{name}", label, "train", locator, version)
        for name, locator, version in images
    ]


def decode_part_item(root: Place, entry: Entry) -> Pixels:
    """Pixels of an image in a folder or in an archive."""
    if ".tar:" not in entry.locator:
        return decode_image_file(root / entry.locator)
    content = read_member(root, entry.locator, entry.version)
    return decode_image_bytes(content, where=entry.item_id)
