"""Folders of finished steps, wherever they are: on this disk, or in an object store.

`folder / name` is the path of a file on this machine. A plain `Path` is such a folder; a stored one
fetches the file first. Folders can be pickled, so workers on other machines get them as they are.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

from components.core.object_stores import is_uri


@runtime_checkable
class Folder(Protocol):
    """A folder whose files can be read here."""

    @property
    def name(self) -> str:
        """Its last part."""

    def __truediv__(self, name: str, /) -> Path:
        """The path of a file or folder in it, on this machine; need not exist."""


@runtime_checkable
class RemoteFolder(Folder, Protocol):
    """A folder that is not on this disk."""

    def within(self, name: str) -> Folder:
        """A folder in this one; nothing is fetched yet."""

    def fetched(self) -> Path:
        """The whole folder on this machine."""

    def read(self, name: str) -> bytes:
        """The content of a file."""


_OPENERS: list[Callable[[str], Folder]] = []


def add_opener(opener: Callable[[str], Folder]) -> None:
    """Let `folder_at` open URIs; called once by what knows object stores."""
    _OPENERS[:] = [opener]


def is_below(name: object) -> bool:
    """Whether a name in a document of others leads to a place below the folder it is joined to."""
    if not isinstance(name, str) or "\0" in name:
        return False
    return all(part not in ("", ".", "..") for part in name.split("/"))


def scheme_of(place: str) -> str:
    """`s3://` of a URI, nothing of a path."""
    return place[: place.index("://") + 3] if is_uri(place) else ""


def within(folder: Folder, name: str) -> Folder:
    """A folder in another one; nothing is fetched."""
    return folder.within(name) if isinstance(folder, RemoteFolder) else folder / name


def absolute(folder: Folder) -> str:
    """The absolute path of a folder, or its URI: `folder_at` opens it on any machine."""
    return str(folder.absolute() if isinstance(folder, Path) else folder)


def fetched(folder: Folder) -> Path:
    """The whole folder as a path on this machine."""
    return folder if isinstance(folder, Path) else folder.fetched()  # type: ignore[attr-defined]


def read_bytes(folder: Folder, name: str) -> bytes:
    """The content of a file; nothing of it stays on this machine's disk longer than needed."""
    return folder.read(name) if isinstance(folder, RemoteFolder) else (folder / name).read_bytes()


def folder_at(place: str) -> Folder:
    """A folder by its path, or by its URI."""
    if is_uri(place) and _OPENERS:
        return _OPENERS[0](place)
    return Path(place).expanduser()
