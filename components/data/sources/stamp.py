"""Digest of a source's content: results are invalid once the files have changed."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from components.core.digests import digest_file, digest_json
from components.core.errors import CasemateError, at_key
from components.core.object_stores import is_uri
from components.data.places import Place, RemotePath, below, missing, place_of
from components.data.sources.files import looks_like_image
from components.data.sources.registry import find_source
from components.data.sources.versions import unreachable

READ_UP_TO = 2**30  # bytes; reading all of a larger folder would take hours
SMALL_FILE = 2**24  # bytes; labels and maps are below, and are always read
ENDS = 2**20  # bytes at each end of a large file


def source_stamp(source: str, path: str | None, options: Mapping[str, Any] | None = None) -> str:
    """Digest of the bytes below `path`, links followed; for folders above 1 GiB of a part of them.

    There an image counts by name and size, other files by their bytes if small, else by size
    and both ends. The location does not count: a copy elsewhere is the same data.
    Objects count by name, size and tag, which the listing has: a copy in a store is other data than
    the files it was made of. Files that options name count by content too.
    """
    content = source if path is None else _path_stamp(source, path)
    named = named_files(source, options or {})
    files = {name: _digest(file) for name, file in named.items()}
    return digest_json([content, files]) if files else content


def named_files(source: str, options: Mapping[str, Any]) -> dict[str, Place]:
    """Options that name an existing file; other values, such as a built-in list, are left out."""
    named = {
        option.name: _named(f"data.options.{option.name}", str(options[option.name]))
        for option in find_source(source).options
        if option.is_file and option.name in options
        if options[option.name] not in option.built_in
    }
    found = {}
    for name, file in named.items():
        with at_key(f"data.options.{name}"):
            if file.is_file():
                found[name] = file
    return found


def _named(key: str, path: str) -> Place:
    with at_key(key):
        return place_of(path) if is_uri(path) else Path(path).expanduser()


def _path_stamp(source: str, path: str) -> str:
    if is_uri(path):
        return _objects_stamp(RemotePath.parse(path))
    root = Path(path).expanduser()
    try:
        if root.is_file():
            return digest_file(root)
        if not root.is_dir():
            raise CasemateError("data.path", root, f"does not exist; source {source} reads it")
        sizes = {file: file.stat().st_size for file in sorted(_files(root, above=()))}
        name_of = digest_file if sum(sizes.values()) <= READ_UP_TO else _partial_name
        return digest_json([[f.relative_to(root).as_posix(), name_of(f)] for f in sizes])
    except OSError as error:
        raise unreachable(Path(error.filename or root), error) from error


def _objects_stamp(root: RemotePath) -> str:
    """Digest of the listing; nothing is read."""
    alone = root.stat_object()
    if alone is not None:
        return digest_json(["object", alone.version])
    names = {
        below(path, root).as_posix(): path.facts.version for path in root.rglob("*") if path.facts
    }
    if not names:
        raise missing(root)
    return digest_json(["objects", sorted(names.items())])


def _files(folder: Path, *, above: tuple[tuple[int, int], ...]) -> Iterator[Path]:
    """Files at any depth; a link back to a folder `above` it is not followed again."""
    stat = folder.stat()
    place = (stat.st_dev, stat.st_ino)
    if place in above:
        return
    with os.scandir(folder) as items:
        for item in items:
            if item.is_dir():
                yield from _files(Path(item.path), above=(*above, place))
            elif item.is_file():
                yield Path(item.path)
            elif item.is_symlink():
                remedy = "is a dangling link; fix or remove it"
                raise CasemateError("data.path", item.path, remedy)


def _digest(file: Place) -> str:
    if isinstance(file, Path):
        return digest_file(file)
    return hashlib.sha256(file.read_bytes()).hexdigest()  # as digest_file: the same list, elsewhere


def _partial_name(file: Path) -> str | int | list[str | int]:
    """Identity of a file in a folder that is too large to read."""
    size = file.stat().st_size
    if looks_like_image(file.name):
        return size
    if size < SMALL_FILE:
        return digest_file(file)
    with file.open("rb") as content:
        ends = hashlib.sha256(content.read(ENDS))
        content.seek(-ENDS, os.SEEK_END)
        ends.update(content.read(ENDS))
    return [size, ends.hexdigest()]
