"""Oxford Flowers-102 (Nilsback & Zisserman 2008) from its images and two .mat files.

`jpg/image_00001.jpg`..., `imagelabels.mat` with labels from 1, `setid.mat` with the image numbers
of the published splits: 1020 train, 1020 val, 6149 test.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from components.core.errors import CasemateError
from components.data.places import Place
from components.data.sources.base import Entry, Pixels, SourceDefaults
from components.data.sources.files import decode_image_file, first_folder, flat_images
from components.data.sources.versions import file_version

_SPLIT_KEYS = {"train": "trnid", "val": "valid", "test": "tstid"}


@dataclass(frozen=True, slots=True)
class FlowersSource(SourceDefaults):
    """Numbered images below `root`."""

    root: Place
    classes: tuple[str, ...]

    def entries(self) -> list[Entry]:
        labels = _numbers(self.root / "imagelabels.mat", "labels", largest=len(self.classes))
        versions = dict(flat_images(self.root / "jpg"))
        found: list[Entry] = []
        taken: set[int] = set()
        for split, key in _SPLIT_KEYS.items():
            numbers = _numbers(self.root / "setid.mat", key, largest=len(labels))
            if not taken.isdisjoint(numbers) or len(set(numbers)) < len(numbers):
                remedy = f"lists an image twice, the second time under {key}"
                raise CasemateError("data.path", self.root / "setid.mat", remedy)
            taken.update(numbers)
            for number in numbers:
                name, label = f"image_{number:05d}.jpg", labels[number - 1] - 1
                version = versions.get(name) or file_version(self.root / "jpg" / name)
                place = f"jpg/{name}"
                found.append(Entry(f"flowers102-{number:05d}", label, split, place, version))
        return found

    def decode(self, entry: Entry) -> Pixels:
        return decode_image_file(self.root / entry.locator)


def open_flowers102(root: Place) -> FlowersSource:
    """All three parts in `root`, or in the folder that torchvision makes below it."""
    from torchvision.datasets import Flowers102  # has the class names; imported on the driver only

    home = first_folder(root, ("", "flowers-102"), wanted="imagelabels.mat")
    for part in ("setid.mat", "jpg"):
        if not (home / part).exists():
            raise CasemateError("data.path", home, f"lacks {part}; all three parts are needed")
    return FlowersSource(home, tuple(Flowers102.classes))


def _numbers(path: Place, key: str, *, largest: int) -> list[int]:
    """A row of numbers from 1 to `largest`."""
    from scipy.io import loadmat

    try:
        with path.open("rb") as file:
            row: NDArray[Any] = np.atleast_1d(loadmat(file, squeeze_me=True)[key])
    except CasemateError:
        raise
    except Exception as error:  # a damaged .mat fails in many ways
        remedy = f"is not the published file with a row `{key}` ({error})"
        raise CasemateError("data.path", path, remedy) from error
    if row.ndim != 1 or not np.issubdtype(row.dtype, np.integer) or not len(row):
        raise CasemateError("data.path", path, f"has no row of whole numbers under `{key}`")
    if row.min() < 1 or row.max() > largest:
        wrong = int(row.min() if row.min() < 1 else row.max())
        raise CasemateError(
            "data.path", path, f"has {wrong} under `{key}`; allowed: 1 to {largest}"
        )
    return [int(number) for number in row]
