"""A folder of image files, one sub-folder per class, with or without native splits."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from components.core.errors import CasemateError
from components.data.places import Place, below
from components.data.sources.base import Entry, NamedSplits, Pixels
from components.data.sources.files import (
    check_utf8,
    decode_image_file,
    first_folder,
    looks_like_image,
    no_images,
    sub_folders,
)
from components.data.sources.splitting import split_hints, usual_split
from components.data.sources.versions import file_bytes, file_version

_SPLITS = ("train", "val", "test")
MOST_WRAPPERS = 4  # folders around the class folders that are looked through
OF_MACOS = "__MACOSX"  # beside the content of archives that were made there


@dataclass(frozen=True, slots=True)
class FolderSource(NamedSplits):
    """Image files below `root`; `splits` is empty if the first level holds the classes."""

    root: Place
    splits: tuple[tuple[str, str], ...]  # (folder, ours)
    classes: tuple[str, ...]

    def entries(self) -> list[Entry]:
        found: list[Entry] = []
        for folder, hint in self.splits or (("", None),):
            base = self.root / folder
            for name in sub_folders(base):
                if name not in self.classes:
                    remedy = "is a class that the train folder does not have"
                    raise CasemateError("data.path", base / name, remedy)
                found += self._class_entries(base / name, label=self.classes.index(name), hint=hint)
        return found

    def _class_entries(self, folder: Place, *, label: int, hint: str | None) -> list[Entry]:
        found: Iterable[Place] = folder.rglob("*")
        images = (path for path in found if _is_image(path, root=folder))
        files = sorted(images, key=lambda path: below(path, folder).parts)
        if not files:
            raise no_images(folder)
        if all(path.parent != folder for path in files):  # a split, or a group of classes
            remedy = (
                "is not a class: it holds folders of images, but no image of its own; if they are "
                "the classes, name this folder"
            )
            raise CasemateError("data.path", folder, remedy)
        names = [below(path, self.root).as_posix() for path in files]
        return [
            Entry(f"folder-{name}", label, hint, locator=name, version=file_version(path))
            for name, path in zip(names, files, strict=True)
        ]

    def decode(self, entry: Entry) -> Pixels:
        return decode_image_file(self.root / entry.locator)

    def encoded(self, entry: Entry) -> bytes:
        """The file itself."""
        return file_bytes(self.root / entry.locator)


def open_folder(root: Place, *, splits: dict[str, str] | None = None) -> FolderSource:
    """Native splits if the first level has their names (`train`, `valid`, ...); else classes."""
    hints = _split_folders(root, splits)
    ordered = tuple(sorted(hints.items(), key=lambda pair: (_SPLITS.index(pair[1]), pair[0])))
    if not ordered:
        return _checked(FolderSource(root, (), tuple(sub_folders(root))))
    ours = set(hints.values())
    if "train" not in ours and ours != {"test"}:
        remedy = f"has {', '.join(folder for folder, _ in ordered)} but nothing to train on"
        raise CasemateError("data.path", root, remedy)
    main = "train" if "train" in ours else "test"
    named = {c for folder, split in ordered if split == main for c in sub_folders(root / folder)}
    return _checked(FolderSource(root, ordered, tuple(sorted(named))))


def open_imagenette(root: Place) -> FolderSource:
    """Imagenette by wnids, in the folder that its archive unpacks to, or in `root` itself."""
    names = ("", "imagenette2", "imagenette2-320", "imagenette2-160")
    home = first_folder(root, names, wanted="train")
    return open_folder(home, splits={"train": "train", "test": "val"})


def _split_folders(root: Place, chosen: Mapping[str, str] | None) -> dict[str, str]:
    """Folder -> train, val or test; empty if the first level holds the classes.

    A class may be called `train`: it holds images, while a split holds only folders.
    """
    top = sub_folders(root)
    if chosen is not None:
        return split_hints(top, chosen)
    words = [name for name in top if usual_split(name)]
    flat = [name for name in words if _has_images(root / name)]
    if not words or (words == flat and len(words) == 1 < len(top)):
        return {}
    if flat:
        remedy = "holds images; a split holds class folders: fix it or set data.options.splits"
        raise CasemateError("data.path", root / flat[0], remedy)
    return split_hints(top, None)


def _checked(source: FolderSource) -> FolderSource:
    if len({*source.classes} - {OF_MACOS}) < 2 and (inner := wrapped(source.root)):
        raise CasemateError("data.path", source.root, wrapped_words(inner))
    if len(source.classes) < 2:
        remedy = f"has {len(source.classes)} class folders; images go to one folder per class"
        raise CasemateError("data.path", source.root, remedy)
    return source


def wrapped(root: Place) -> Place | None:
    """The folder with the class folders, if all folders above it hold one folder and no image.

    Archives unpack like that.
    """
    place = root
    for _ in range(MOST_WRAPPERS):
        names = [name for name in sub_folders(place) if name != OF_MACOS]
        if _has_images(place) or not names:
            return None
        if len(names) > 1 or usual_split(names[0]):
            return None if place is root else place
        place = place / names[0]
    return None


def wrapped_words(inner: Place) -> str:
    """The remedy for a folder around that of the classes."""
    return f"holds one folder, and the class folders are in {inner}: name that one"


def _has_images(folder: Place) -> bool:
    return any(looks_like_image(path.name) and not path.is_dir() for path in folder.iterdir())


def _is_image(path: Place, *, root: Place) -> bool:
    """Whether an image, at any depth; a dangling link counts, so that it is reported."""
    if not looks_like_image(path.name) or path.is_dir():
        return False
    parts = below(path, root).parts
    if any(part.startswith(".") for part in parts):
        return False
    check_utf8("/".join(parts), root)
    return True
