"""Sources of images: each lists its items cheaply and decodes them one by one.

`registry.py` lists all sources; `casemate data` prints the list. Light to import: numerical
libraries are loaded when a source is opened.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from components.core.errors import CasemateError
from components.data.places import RemotePath, missing, place_of
from components.data.sources.info import Option, SourceInfo, check_options, check_place
from components.data.sources.registry import HUB_PREFIX, SOURCE_NAMES, all_sources, find_source

if TYPE_CHECKING:
    from components.data.sources.base import Source

__all__ = [
    "SOURCE_NAMES",
    "Option",
    "SourceInfo",
    "all_sources",
    "find_source",
    "open_source",
]


def open_source(
    name: str, *, path: str | None, options: Mapping[str, Any] | None = None
) -> "Source":
    """The source of that name; `path` is a folder or file, or the URI of one."""
    info = find_source(name)
    chosen = dict(options or {})
    check_options(info, chosen)
    if info.path == "none":
        if path is not None:
            raise CasemateError("data.path", path, f"does not apply to source {name}; remove it")
        return info.opener()(**chosen)
    if info.path == "needed" and path is None:
        raise CasemateError("data.path", path, f"must be set for source {name}: {info.path_help}")
    check_place(info, path)
    place = None if path is None else place_of(path)
    if isinstance(place, RemotePath) and not place.exists():
        raise missing(place)
    if info.by_name:
        return info.opener()(name.removeprefix(HUB_PREFIX), place, **chosen)
    return info.opener()(place, **chosen)
