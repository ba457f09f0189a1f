"""Tar archives that are read without unpacking: an index of their headers, then members by range.

Indexing holds `WINDOW` bytes and skips members that are larger; of an archive inside an archive it
holds `HEADERS` bytes. Workers get the place of each member and read it with one request, so they
need no index.
"""

import tarfile
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from components.core.errors import CasemateError
from components.data.places import WINDOW, Place
from components.data.sources.files import check_utf8
from components.data.sources.versions import file_size, part_file, read_range

HEADERS = 2**12  # bytes that are held of an archive inside an archive, of which many are read
BLOCK = 512  # bytes; archives end with two blocks of zeros


class Member(NamedTuple):
    """A file inside an archive."""

    name: str
    start: int  # in the outermost archive
    size: int

    def locator(self, archive: str) -> str:
        """Its place: the archive and the range."""
        return f"{archive}:{self.start}:{self.size}"


def read_member(root: Place, locator: str, version: str) -> bytes:
    """The bytes of a member; `version` is that of the archive when it was indexed."""
    archive, start, size = locator.rsplit(":", 2)
    return read_range(root / archive, int(start), int(size), version)


@lru_cache(maxsize=2)  # train and val of one dataset
def members(archive: Place, version: str) -> tuple[Member, ...]:
    """The files of an archive, in its order; folders and links are left out."""
    whole = Member("", 0, file_size(version))
    return _indexed(archive, version, whole, window=WINDOW)


def inner_members(archive: Place, version: str, inner: Member) -> tuple[Member, ...]:
    """The files of an archive that is a member of another one."""
    return _indexed(archive, version, inner, window=HEADERS)


def _indexed(archive: Place, version: str, part: Member, *, window: int) -> tuple[Member, ...]:
    """The files of the archive that is this part of a file."""
    where = f"{archive} [{part.name}]" if part.name else str(archive)
    found = []
    with part_file(archive, part.start, part.size, version, window=window) as file:
        try:
            with tarfile.open(fileobj=file, mode="r:") as content:
                while (entry := content.next()) is not None:
                    content.members = []  # type: ignore[attr-defined]  # else it keeps all
                    if entry.size < 0:  # the next header would be this one
                        raise tarfile.ReadError(f"{entry.name} has {entry.size} bytes")
                    if entry.isreg():
                        check_utf8(entry.name, archive)
                        start = part.start + entry.offset_data
                        found.append(Member(entry.name, start, entry.size))
                end = content.offset
        except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
            raise _damaged(where, str(error)) from error
        except RecursionError:  # tarfile calls itself for each header before a member
            raise _damaged(where, "its headers do not end") from None
    _check_end(where, found, end=part.start + end, size=part.start + part.size)
    return tuple(found)


def _check_end(where: str, found: Iterable[Member], *, end: int, size: int) -> None:
    """Refuse an archive that is cut off, also where the cut is between two members."""
    last = max((member.start + member.size for member in found), default=0)
    if last > size or end + BLOCK > size:
        raise _damaged(where, "it has no end")


def _damaged(where: str, reason: str) -> CasemateError:
    remedy = f"is not a whole tar archive ({reason}); copy it again"
    return CasemateError("data.path", where, remedy)
