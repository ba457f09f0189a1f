"""A name for what a source holds: results must not outlive the files they were made from."""

import os
from pathlib import Path

from components.core.digests import digest_file, digest_json
from components.core.errors import CasemateError

READ_UP_TO = (
    2**30
)  # bytes; larger folders are named by their listing, reading them would take hours


def source_stamp(source: str, path: str | None) -> str:
    """Digest of the bytes below `path`; of names and sizes alone for folders above 1 GiB.

    The place itself never counts: a copy elsewhere is the same data.
    """
    if path is None:
        return source
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
