"""A name for what a source holds: results must not outlive the files they were made from."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.core.digests import digest_file, digest_json
from components.core.errors import CasemateError
from components.data.sources.registry import find_source

READ_UP_TO = (
    2**30
)  # bytes; larger folders are named by their listing, reading them would take hours


def source_stamp(source: str, path: str | None, options: Mapping[str, Any] | None = None) -> str:
    """Digest of the bytes below `path`; of names and sizes alone for folders above 1 GiB.

    The place itself never counts: a copy elsewhere is the same data. Files that options name
    count by content too; a word that is no file, such as a built-in list, counts in the recipe.
    """
    content = source if path is None else _path_stamp(source, path)
    named = {
        option.name: Path(str((options or {})[option.name])).expanduser()
        for option in find_source(source).options
        if option.is_file and option.name in (options or {})
    }
    files = {name: digest_file(file) for name, file in named.items() if file.is_file()}
    return digest_json([content, files]) if files else content


def _path_stamp(source: str, path: str) -> str:
    root = Path(path).expanduser()
    if root.is_file():
        return digest_file(root)
    if not root.is_dir():
        raise CasemateError("data.path", root, f"does not exist; source {source} reads it")
    files = sorted(Path(folder) / name for folder, _, names in os.walk(root) for name in names)
    sizes = [file.stat().st_size for file in files]
    read = sum(sizes) <= READ_UP_TO
    return digest_json(
        [
            [file.relative_to(root).as_posix(), digest_file(file) if read else size]
            for file, size in zip(files, sizes, strict=True)
        ]
    )
