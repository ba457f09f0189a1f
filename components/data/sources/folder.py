"""A folder of image files, one sub-folder per class, with or without native splits."""

from dataclasses import dataclass
from pathlib import Path

from components.core.errors import CasemateError
from components.data.sources.base import Entry, Pixels, SourceDefaults, file_version
from components.data.sources.files import (
    check_utf8,
    decode_image_file,
    looks_like_image,
    no_images,
    sub_folders,
)

_SPLITS = ("train", "val", "test")


@dataclass(frozen=True, slots=True)
class FolderSource(SourceDefaults):
    """Image files below `root`; `split_names` is empty when the first level is the classes."""

    root: Path
    split_names: tuple[str, ...]
    classes: tuple[str, ...]

    def entries(self) -> list[Entry]:
        found: list[Entry] = []
        for split in self.split_names or (None,):
            base = self.root if split is None else self.root / split
            present = sub_folders(base)
            for name in present:
                if name not in self.classes:
                    remedy = "is a class that the train folder does not have"
                    raise CasemateError("data.path", base / name, remedy)
                found += self._class_entries(
                    base / name, label=self.classes.index(name), hint=split
                )
        return found

    def _class_entries(self, folder: Path, *, label: int, hint: str | None) -> list[Entry]:
        files = sorted(path for path in folder.rglob("*") if _is_image(path, below=folder))
        if not files:
            raise no_images(folder)
        names = [path.relative_to(self.root).as_posix() for path in files]
        return [
            Entry(f"folder-{name}", label, hint, locator=name, version=file_version(path))
            for name, path in zip(names, files, strict=True)
        ]

    def decode(self, entry: Entry) -> Pixels:
        return decode_image_file(self.root / entry.locator)


def open_folder(root: Path) -> FolderSource:
    """Native splits when the first level is `train` and perhaps `val`, `test`; else classes."""
    top = sub_folders(root)
    if "train" in top and set(top) <= set(_SPLITS) and sub_folders(root / "train"):
        split_names = tuple(split for split in _SPLITS if split in top)
        return _checked(FolderSource(root, split_names, tuple(sub_folders(root / "train"))))
    return _checked(FolderSource(root, (), tuple(top)))


def _checked(source: FolderSource) -> FolderSource:
    if len(source.classes) < 2:
        remedy = f"has {len(source.classes)} class folders; images go to one folder per class"
        raise CasemateError("data.path", source.root, remedy)
    return source


def _is_image(path: Path, *, below: Path) -> bool:
    """Below the class at any depth; a dangling link counts, so that it is noticed."""
    if not looks_like_image(path.name) or path.is_dir():
        return False
    parts = path.relative_to(below).parts
    if any(part.startswith(".") for part in parts):
        return False
    check_utf8("/".join(parts), below)
    return True
