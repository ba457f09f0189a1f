"""Reading of files as they were listed: a file that has changed since is an error."""

import io
import os
from pathlib import Path
from stat import S_ISREG

from components.core.errors import CasemateError
from components.data.places import WINDOW, Place, RemotePath, buffered, changed, missing


def unreachable(path: Path, error: OSError) -> CasemateError:
    """Error for a file that cannot be opened; never skipped, because the item may be intact."""
    remedy = f"cannot be read here ({error.strerror}); every worker must see data.path"
    return CasemateError("data.path", path, remedy)


def file_version(path: Place) -> str:
    """Size and modification time, of objects size and tag: enough to notice a replaced file."""
    if isinstance(path, RemotePath):
        facts = path.stat_object()
        if facts is None:
            raise missing(path)
        return facts.version
    try:
        stat = path.stat()
    except OSError as error:
        raise unreachable(path, error) from error
    return f"{stat.st_size}-{stat.st_mtime_ns}"


def check_unchanged(path: Place, version: str) -> None:
    """Raise an error if a file has changed since the driver listed it."""
    if file_version(path) != version:
        raise changed(path)


def file_bytes(path: Place) -> bytes:
    """The bytes of a small file, such as an image."""
    if isinstance(path, RemotePath):
        return path.read_bytes()
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            if not S_ISREG(os.fstat(file.fileno()).st_mode):
                raise CasemateError("data.path", path, "is not a regular file; remove it")
            return file.read()
    except OSError as error:
        raise unreachable(path, error) from error


def _without_waiting(path: str, flags: int) -> int:
    """Open a file; a pipe does not wait for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_range(path: Place, start: int, length: int, version: str) -> bytes:
    """`length` bytes from `start` of a file, which must be as it was listed."""
    if isinstance(path, RemotePath):
        return path.read_range(start, length, version)
    check_unchanged(path, version)
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            content = file.read(length)
    except OSError as error:
        raise unreachable(path, error) from error
    if len(content) != length:
        remedy = f"ends {length - len(content)} bytes too early; copy it again"
        raise CasemateError("data.path", path, remedy)
    return content


def part_file(
    path: Place, start: int, length: int, version: str, *, window: int = WINDOW
) -> io.BufferedReader:
    """A part of a file as a file of its own, of which `window` bytes are held."""
    return buffered(
        lambda at, size: read_range(path, at, size, version), start, length, window=window
    )


def file_size(version: str) -> int:
    """The size that a version begins with."""
    return int(version.partition("-")[0])
