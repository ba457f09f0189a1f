"""CIFAR-10 and CIFAR-100 from the published python batches (Krizhevsky 2009) or from one .npz.

Both forms give the same item ids. Folders and batch files are where torchvision puts them.
torchvision's reader accepts only the published checksums and then unpickles without limits, and a
pickle may run code. This loader builds plain containers and numpy arrays only; anything else in a
file is an error.
"""

import pickle
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, BinaryIO

import numpy as np

from components.core.errors import CasemateError
from components.data.places import Place, below
from components.data.sources.base import Entry, Pixels, SourceDefaults
from components.data.sources.labels import check_class_names, check_label_range, checked_labels
from components.data.sources.names import CIFAR10, CIFAR100
from components.data.sources.npz import NpzSource, open_npz
from components.data.sources.versions import check_unchanged, file_version

# What pickled numpy arrays need, under the module names of numpy 1 and 2. `_codecs.encode` is how
# python 3 writes bytes in protocol 2; it can only turn a string into bytes.
_ALLOWED = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("_codecs", "encode"),
}


@dataclass(frozen=True, slots=True)
class _Layout:
    """File names and dictionary keys of one published archive."""

    name: str
    folder: str
    batches: tuple[tuple[str, str], ...]  # (split, file)
    label_key: str
    meta_file: str
    meta_key: str
    classes: tuple[str, ...]  # for archives without class names


_CIFAR10 = _Layout(
    name="cifar10",
    folder="cifar-10-batches-py",
    batches=(*(("train", f"data_batch_{i}") for i in range(1, 6)), ("test", "test_batch")),
    label_key="labels",
    meta_file="batches.meta",
    meta_key="label_names",
    classes=CIFAR10,
)
_CIFAR100 = _Layout(
    name="cifar100",
    folder="cifar-100-python",
    batches=(("train", "train"), ("test", "test")),
    label_key="fine_labels",
    meta_file="meta",
    meta_key="fine_label_names",
    classes=CIFAR100,
)


@dataclass(frozen=True, slots=True)
class CifarSource(SourceDefaults):
    """Batch files below `folder`; each worker caches the batches it reads."""

    layout: _Layout
    folder: Place
    classes: tuple[str, ...]

    def entries(self) -> list[Entry]:
        found: list[Entry] = []
        counts = {"train": 0, "test": 0}
        for split, file in self.layout.batches:
            path = self.folder / file
            version = file_version(path)
            for row, label in enumerate(self._labels(path)):
                item_id = f"{self.layout.name}-{split}-{counts[split]:05d}"
                found.append(Entry(item_id, label, split, f"{file}:{row}", version))
                counts[split] += 1
        return found

    def _labels(self, path: Place) -> list[int]:
        batch = _read_pickle(path)
        num_items = len(_checked_rows(path, batch))
        labels = np.asarray(batch.get(self.layout.label_key, ()))
        plain = checked_labels(labels, where=str(path), num_items=num_items)
        check_label_range(plain, where=str(path), num_classes=len(self.classes))
        return plain

    def decode(self, entry: Entry) -> Pixels:
        file, row = entry.locator.split(":")
        flat: Pixels = _read_rows(self.folder / file, entry.version)[int(row)]
        return flat.reshape(3, 32, 32).transpose(1, 2, 0)  # stored plane by plane


def open_cifar10(root: Place) -> CifarSource | NpzSource:
    """CIFAR-10 in `root/cifar-10-batches-py`, in that folder itself, or in the file `root`."""
    return _open(root, _CIFAR10)


def open_cifar100(root: Place) -> CifarSource | NpzSource:
    """CIFAR-100 with its 100 fine classes, in `root/cifar-100-python`, in it, or in a file."""
    return _open(root, _CIFAR100)


def _open(root: Place, layout: _Layout) -> CifarSource | NpzSource:
    if root.is_file():
        return _open_npz(root, layout)
    inside = (root / layout.meta_file).is_file()  # the path names the unpacked folder itself
    folder = root if inside else root / layout.folder
    for file in (layout.meta_file, *(file for _, file in layout.batches)):
        if not (folder / file).is_file():
            place = below(folder / file, root)
            remedy = f"lacks the file {place}; unpack the python archive there"
            raise CasemateError("data.path", root, remedy)
    return CifarSource(layout, folder, _class_names(folder / layout.meta_file, layout))


def _class_names(path: Place, layout: _Layout) -> tuple[str, ...]:
    names = _read_pickle(path).get(layout.meta_key)
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise CasemateError("data.path", path, f"has no list of names under {layout.meta_key}")
    check_class_names(tuple(names), key="data.path", where=path)
    _check_num_classes(path, tuple(names), layout)
    return tuple(names)


def _check_num_classes(path: Place, names: tuple[str, ...], layout: _Layout) -> None:
    if len(names) != len(layout.classes):
        remedy = f"names {len(names)} classes; {layout.name} has {len(layout.classes)}"
        raise CasemateError("data.path", path, remedy)


def _open_npz(path: Place, layout: _Layout) -> NpzSource:
    source = open_npz(path, name=layout.name, default_classes=layout.classes)
    _check_num_classes(path, source.classes, layout)
    for part in source.parts:
        if part.image_shape != (32, 32, 3):
            remedy = f"holds images of {part.image_shape}; {layout.name} has (32, 32, 3)"
            raise CasemateError("data.path", f"{path} [{part.image_key}]", remedy)
    return source


class _ArraysOnly(pickle.Unpickler):
    """Builds numpy arrays and plain containers; rejects any other global."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, encoding="latin1")  # the archives were written by python 2

    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it needs {module_name}.{global_name}")
        return super().find_class(module_name, global_name)


def _read_pickle(path: Place) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = _ArraysOnly(file).load()
    except (MemoryError, CasemateError):
        raise
    except Exception as error:  # a damaged pickle fails in many ways
        remedy = f"is not a plain CIFAR batch ({error}); unpack the archive again"
        raise CasemateError("data.path", path, remedy) from error
    if not isinstance(content, dict):
        raise CasemateError("data.path", path, "is not a CIFAR batch: no dictionary inside")
    return content


def _checked_rows(path: Place, batch: dict[str, Any]) -> Pixels:
    rows: Any = batch.get("data")
    if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or rows.shape[1:] != (3072,):
        raise CasemateError("data.path", path, "lacks `data`, uint8 of shape (N, 3072)")
    return rows


@lru_cache(maxsize=6)  # all of CIFAR-10: shuffled shards touch every batch
def _read_rows(path: Place, version: str) -> Pixels:
    check_unchanged(path, version)
    return _checked_rows(path, _read_pickle(path))
