"""Inputs made by an attacker, and how a refusal must look."""

import io
import json
import os
import resource
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from components.core.errors import CasemateError

DEEP = b"[" * 100_000 + b"]" * 100_000
QUITE_DEEP = b"[" * 500 + b"]" * 500  # json reads it, later steps could not
CLEAR = "\x1b[2J\x1b]0;owned\x07"  # clears the terminal and renames its window
REVERSED = "\u202egpj.exe"  # shown as exe.jpg
NAMES = ("../../escape", "/etc/escape", "a/../../escape", "", ".", "a//b", "x\0y")
MARK = "the-payload-ran"


class Payload:
    """Writes a file where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {MARK}",)


@contextmanager
def little_memory(extra: int = 2**31) -> Iterator[None]:
    """An allocation of more than `extra` bytes fails at once, not after the machine is full."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + extra, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def refusal(call: Callable[[], object], *words: str, num_problems: int = 1) -> str:
    """The line with which input is refused, or one for each problem of a recipe."""
    with little_memory(), pytest.raises(CasemateError) as caught:
        call()
    lines = str(caught.value).split("\n")
    assert len(lines) <= num_problems
    assert all(line.isprintable() for line in lines)
    assert len(str(caught.value)) < 2000
    for word in words:
        assert word in lines[0]
    return lines[0]


def npz(path: Path, arrays: dict[str, bytes], *, packed: bool = True) -> Path:
    kind = zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, content in arrays.items():
            archive.writestr(f"{name}.npy", content)
    return path


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue()


def safetensors(path: Path, header: object, body: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + body)
    return path


def tar(path: Path, *members: tuple[str, bytes, bytes]) -> Path:
    """An archive of (name, type, content)."""
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
        for name, kind, content in members:
            member = tarfile.TarInfo(name)
            member.type, member.size, member.linkname = kind, len(content), "/etc/passwd"
            archive.addfile(member, io.BytesIO(content))
    return path
