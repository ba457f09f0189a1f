"""A folder of image files, one sub-folder per class, with or without native splits.

Pixels are taken as stored: an EXIF rotation is not applied, transparency is dropped.
"""

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from components.core.errors import CasemateError
from components.data.sources.base import (
    Entry,
    Pixels,
    UndecodableItemError,
    file_version,
    unreachable,
)

_SPLITS = ("train", "val", "test")
_SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
_GREY_MODES = {"1", "L", "LA"}
_COLOUR_MODES = {"P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"}


@dataclass(frozen=True, slots=True)
class FolderSource:
    """Image files below `root`; `split_names` is empty when the first level is the classes."""

    root: Path
    split_names: tuple[str, ...]
    classes: tuple[str, ...]

    def entries(self) -> list[Entry]:
        found: list[Entry] = []
        for split in self.split_names or (None,):
            base = self.root if split is None else self.root / split
            present = _class_folders(base)
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
            kinds = " ".join(sorted(_SUFFIXES))
            raise CasemateError("data.path", folder, f"holds no image; looked for {kinds}")
        names = [path.relative_to(self.root).as_posix() for path in files]
        return [
            Entry(f"folder-{name}", label, hint, locator=name, version=file_version(path))
            for name, path in zip(names, files, strict=True)
        ]

    def decode(self, entry: Entry) -> Pixels:
        path = self.root / entry.locator
        try:
            content = path.read_bytes()
        except OSError as error:
            raise unreachable(path, error) from error
        try:
            with Image.open(io.BytesIO(content)) as image:
                return _to_pixels(image)
        except MemoryError:
            raise
        except Exception as error:  # format plug-ins raise many types for damaged files
            reason = str(error).split(" <")[0]  # Pillow prints the address of a buffer
            remedy = f"is not a readable image ({reason}); mend it or set data.on_error=skip"
            raise UndecodableItemError("data.path", path, remedy) from error


def open_folder(root: Path) -> FolderSource:
    """Native splits when the first level is `train` and perhaps `val`, `test`; else classes."""
    if not root.is_dir():
        raise CasemateError("data.path", root, "is not a folder")
    top = _class_folders(root)
    if "train" in top and set(top) <= set(_SPLITS) and _class_folders(root / "train"):
        split_names = tuple(split for split in _SPLITS if split in top)
        return _checked(FolderSource(root, split_names, tuple(_class_folders(root / "train"))))
    return _checked(FolderSource(root, (), tuple(top)))


def _checked(source: FolderSource) -> FolderSource:
    if len(source.classes) < 2:
        remedy = f"has {len(source.classes)} class folders; images go to one folder per class"
        raise CasemateError("data.path", source.root, remedy)
    return source


def _class_folders(folder: Path) -> list[str]:
    names = [path.name for path in folder.iterdir() if path.is_dir() and path.name[0] != "."]
    for name in names:
        _check_utf8(name, folder)
    return sorted(names)


def _is_image(path: Path, *, below: Path) -> bool:
    """By suffix, hidden files aside; a dangling link counts, so that it is noticed."""
    if path.suffix.lower() not in _SUFFIXES or path.is_dir():
        return False
    parts = path.relative_to(below).parts
    if any(part.startswith(".") for part in parts):
        return False
    _check_utf8("/".join(parts), below)
    return True


def _check_utf8(name: str, folder: Path) -> None:
    try:
        name.encode()
    except UnicodeEncodeError as error:  # Parquet strings and seeds are UTF-8
        remedy = f"holds a name that is not UTF-8: {name!a}; rename it"
        raise CasemateError("data.path", ascii(str(folder)), remedy) from error


def _to_pixels(image: Image.Image) -> Pixels:
    if image.mode in _GREY_MODES:
        return np.asarray(image.convert("L"), dtype=np.uint8)[..., None]
    if image.mode in _COLOUR_MODES:
        return np.asarray(image.convert("RGB"), dtype=np.uint8)
    raise ValueError(f"mode {image.mode} is not 8 bits per channel")
