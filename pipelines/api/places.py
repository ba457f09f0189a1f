"""Folders that a user names: by a path, or by the URI of a step in an object store."""

from pathlib import Path
from typing import TYPE_CHECKING

from components.core.folders import Folder, fetched, folder_at
from components.core.object_stores import is_uri

if TYPE_CHECKING:
    from pipelines.runtime.storage import StepPlace


def opened(place: str | Path) -> Folder:
    """The folder at a path or URI; its files are fetched when they are read."""
    return folder_at(str(place)) if is_uri(str(place)) else Path(place)


def local_path(place: str | Path) -> Path:
    """The path itself, or a folder on this machine with all files of a stored step."""
    return fetched(folder_at(str(place))) if is_uri(str(place)) else Path(place)


def shown(place: "StepPlace") -> Path | str:
    """Where a step is: the path of its folder, or its URI."""
    return place.path if place.storage.is_local else str(place)


def beside(place: str | Path, ending: str) -> Path:
    """The default place of a result: beside a folder, or here for a stored step."""
    if is_uri(str(place)):
        return Path(f"{opened(place).name}{ending}")
    path = Path(place)
    folder = path if path.is_dir() else path.parent
    return folder.with_name(f"{folder.resolve().name}{ending}")
