"""Arrays that are too large to read: rows by ranges of an object, or a map of a temporary file."""

import io
import math
import shutil
import tempfile
from dataclasses import dataclass, field
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from components.core.errors import CasemateError
from components.data.places import Place
from components.data.sources.versions import read_range

COPY = 2**20  # bytes at a time into a temporary file

NpyHeader = tuple[tuple[int, ...], bool, "np.dtype[Any]"]


def npy_header(file: IO[bytes]) -> NpyHeader:
    """Shape, Fortran order and type of one array without reading it."""
    if np.lib.format.read_magic(file) == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    return np.lib.format.read_array_header_2_0(file)


@dataclass(slots=True)
class RangedRows:
    """Rows of an array inside a file, read when they are asked for; `ahead` bytes are held."""

    place: Place
    version: str
    offset: int  # of the first row in the file
    shape: tuple[int, ...]
    dtype: "np.dtype[Any]"
    ahead: int = 0
    _first: int = field(default=0, init=False, repr=False)
    _held: bytes = field(default=b"", init=False, repr=False)

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def __getitem__(self, row: int) -> NDArray[Any]:
        if not 0 <= row < self.shape[0]:
            raise IndexError(row)
        start = (row - self._first) * self.row_bytes
        if not 0 <= start < len(self._held):
            self._fill(row)
            start = 0
        content = self._held[start : start + self.row_bytes]
        return np.frombuffer(content, self.dtype).reshape(self.shape[1:])

    def _fill(self, row: int) -> None:
        count = min(max(1, self.ahead // self.row_bytes), self.shape[0] - row)
        at = self.offset + row * self.row_bytes
        self._held = read_range(self.place, at, count * self.row_bytes, self.version)
        self._first = row


def unpacked_array(file: IO[bytes], size: int, *, where: Place) -> NDArray[Any]:
    """A map of the .npy that `file` holds, unpacked into a temporary file without a name.

    The system frees its disk when the array is dropped or the process ends, however it ends.
    """
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if free < size:
        raise _no_room(where, size, folder, free)
    with tempfile.TemporaryFile(dir=folder) as target:
        try:
            shutil.copyfileobj(file, target, COPY)
            target.flush()
        except OSError as error:
            raise _no_room(where, size, folder, free) from error
        if target.tell() != size:
            raise EOFError(f"it ends after {target.tell()} of {size} bytes")
        target.seek(0)
        shape, fortran, dtype = npy_header(target)
        order: Any = "F" if fortran else "C"
        return np.memmap(target, dtype, mode="r", offset=target.tell(), shape=shape, order=order)


def _no_room(where: Place, size: int, folder: str, free: int) -> CasemateError:
    remedy = (
        f"unpacks to {size / 2**30:.1f} GiB, {free / 2**30:.1f} are free in {folder}; "
        "set TMPDIR, or store the arrays uncompressed (np.savez)"
    )
    return CasemateError("data.path", where, remedy)


def whole_array(content: bytes) -> NDArray[Any]:
    """The array of a .npy that was read."""
    found: NDArray[Any] = np.load(io.BytesIO(content), allow_pickle=False)
    return found
