"""Atomic writes: a file is written under a temporary name, then renamed.

Readers see the old file or the new one, never a part of it. Every writer uses its own temporary
name, so two processes that write the same file do not interfere; `leftovers` lists the temporary
files of killed writers.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

TEMPORARY = ".*.tmp"  # the pattern of temporary names


@contextmanager
def atomic(path: Path, *, sync: bool = True) -> Iterator[Path]:
    """Yield a temporary path to write to; after the block it replaces `path`.

    If the block fails, `path` stays as it was. With `sync`, the content is on disk before the
    rename, so that the file also survives a power failure.
    """
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    try:
        yield temporary
        if sync:
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path, content: bytes, *, sync: bool = True) -> Path:
    """Write bytes; returns `path`."""
    with atomic(path, sync=sync) as temporary:
        temporary.write_bytes(content)
    return path


def write_text(path: Path, text: str, *, sync: bool = True) -> Path:
    """Write UTF-8 text without converting line ends; returns `path`."""
    return write_atomic(path, text.encode(), sync=sync)


def write_json(path: Path, value: object) -> Path:
    """Write `json_text` of a value; returns `path`."""
    return write_text(path, json_text(value))


def json_text(value: object) -> str:
    """JSON that is the same for equal values: sorted keys, indented; NaN is an error."""
    return json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n"


def rename(path: Path, name: str) -> Path:
    """Give a file another name in its folder; returns its new path."""
    return path.replace(path.with_name(name))


def put_in_place(written: Path, target: Path) -> None:
    """Give a complete file its final name, in place of a file that has it."""
    written.replace(target)


def move_folder(folder: Path, target: Path) -> None:
    """Give a complete folder its final name; `OSError` if that name exists."""
    folder.rename(target)


def leftovers(folder: Path) -> list[Path]:
    """Temporary files that killed writers left in a folder and those below it."""
    return sorted(path for path in folder.rglob(TEMPORARY) if path.is_file())
