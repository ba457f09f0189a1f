"""Public datasets, downloaded whole or not at all: torchvision's addresses and MD5 checksums.

Files go to a hidden folder inside the target first. What they unpack to is published by one rename,
after every archive had its checksum; beside it is a record of the size and SHA-256 of each file,
by which a later call finds a copy that is complete, and names a damaged file of one that is not.
An interrupted download continues with the archives that it lacks.
"""

import errno
import fcntl
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from components.core.digests import digest_file
from components.core.errors import CasemateError, first_line
from components.core.files import move_folder, write_json
from components.core.hints import did_you_mean
from components.core.object_stores import is_uri

Report = Callable[[str], None]  # takes one line about what happens now
MEGABYTE = 2**20
SILENCE_SECONDS = 60.0  # a server that sends nothing for so long is lost


@dataclass(frozen=True, slots=True)
class Archive:
    """A file to download, from the first address that answers."""

    urls: tuple[str, ...]
    md5: str

    @property
    def name(self) -> str:
        return Path(urlsplit(self.urls[0]).path).name


@dataclass(frozen=True, slots=True)
class Download:
    """One dataset: the folder that it becomes, and how."""

    folder: str  # below the target, where torchvision and the source of the same name look
    megabytes: int  # of the archives and what they unpack to, roughly: both are there at once
    archives: Callable[[], tuple[Archive, ...]]
    unpack: Callable[[Path, tuple[Archive, ...], Path], None]  # from a folder into the new one
    md5s: Callable[[], Mapping[str, str]] = dict  # published, of unpacked files


@dataclass(frozen=True, slots=True)
class Downloaded:
    """A complete copy and the files in it."""

    folder: Path
    num_files: int
    num_bytes: int
    was_there: bool  # nothing was downloaded


def _cifar(name: str, *, megabytes: int) -> Download:
    def table() -> Any:
        from torchvision import datasets

        return getattr(datasets, name)

    def md5s() -> dict[str, str]:
        known = dict(table().train_list + table().test_list)
        return known | {table().meta["filename"]: table().meta["md5"]}

    return Download(
        "cifar-10-batches-py" if name == "CIFAR10" else "cifar-100-python",
        megabytes,
        lambda: (Archive((table().url,), table().tgz_md5),),
        _unpack_whole,
        md5s,
    )


def _idx(name: str) -> Download:
    def archives() -> tuple[Archive, ...]:
        from torchvision import datasets

        table = getattr(datasets, name)
        return tuple(
            Archive(tuple(mirror + file for mirror in table.mirrors), md5)
            for file, md5 in table.resources
        )

    return Download(name, 80, archives, _unpack_idx)


def _flowers() -> tuple[Archive, ...]:
    from torchvision.datasets import Flowers102

    prefix, files = Flowers102._download_url_prefix, Flowers102._file_dict
    return tuple(Archive((prefix + name,), md5) for name, md5 in files.values())


def _imagenette() -> tuple[Archive, ...]:
    from torchvision.datasets import Imagenette

    url, md5 = Imagenette._ARCHIVES["full"]
    return (Archive((url,), md5),)


# Address and checksum are inside a method of torchvision's Caltech101; a test compares them.
CALTECH = Archive(
    ("https://data.caltech.edu/records/mzrjq-6wc02/files/caltech-101.zip",),
    "3138e1922a9193bfa496528edbbc45d0",
)


def _unpack_whole(packed: Path, archives: tuple[Archive, ...], folder: Path) -> None:
    """One archive that holds the folder itself."""
    _extract(packed / archives[0].name, folder.parent)


def _unpack_idx(packed: Path, archives: tuple[Archive, ...], folder: Path) -> None:
    (folder / "raw").mkdir(parents=True)
    for archive in archives:
        _extract(packed / archive.name, folder / "raw")


def _unpack_flowers(packed: Path, archives: tuple[Archive, ...], folder: Path) -> None:
    images, *tables = archives
    _extract(packed / images.name, folder)
    for table in tables:
        shutil.copyfile(packed / table.name, folder / table.name)


def _unpack_caltech(packed: Path, archives: tuple[Archive, ...], folder: Path) -> None:
    """A zip that holds the archive of images, and one of outlines that stays packed."""
    _extract(packed / archives[0].name, folder.parent)
    for inner in sorted((folder.parent / "caltech-101").glob("*.gz")):
        _extract(inner, folder)


DOWNLOADS: Mapping[str, Download] = {
    "cifar10": _cifar("CIFAR10", megabytes=350),
    "cifar100": _cifar("CIFAR100", megabytes=350),
    "mnist": _idx("MNIST"),
    "fashion_mnist": _idx("FashionMNIST"),
    "flowers102": Download("flowers-102", 700, _flowers, _unpack_flowers),
    "caltech101": Download("caltech101", 450, lambda: (CALTECH,), _unpack_caltech),
    "imagenette": Download("imagenette2", 3200, _imagenette, _unpack_whole),
}


def download(name: str, target: str | Path, *, report: Report) -> Downloaded:
    """The dataset of that name below `target`: a verified copy, found there or downloaded."""
    if name not in DOWNLOADS:
        raise CasemateError("data get", repr(name), did_you_mean(name, DOWNLOADS))
    if is_uri(str(target)):
        raise CasemateError("--to", target, "is a URI; give a folder and copy it from there")
    wanted, root = DOWNLOADS[name], Path(target)
    with _written(root):
        return _found(name, wanted, root, report) or _fetched(name, wanted, root, report)


@contextmanager
def _written(root: Path) -> Iterator[None]:
    """What the system refuses below `root`, as one line."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "has no room left; nothing was published, and verified archives are kept"
            raise CasemateError("--to", root, remedy) from error
        reason = error.strerror or first_line(error)
        raise CasemateError("--to", error.filename or root, f"fails: {reason}") from error


# --- a copy that is there ---------------------------------------------------------------------


def _record_of(name: str, root: Path) -> Path:
    return root / f"{name}.download.json"


def _found(name: str, wanted: Download, root: Path, report: Report) -> Downloaded | None:
    """The copy that is there, if every file is as it was downloaded; None if there is none."""
    folder, record = root / wanted.folder, _record_of(name, root)
    if not folder.exists():
        return None
    report(f"checking {folder}")
    if record.is_file():
        files = _recorded(record)
        _check(folder, files)
    else:  # of torchvision, or of a user
        files = _recognised(name, wanted, folder)
        write_json(record, {"files": files, "name": name})
    return _copy(folder, files, was_there=True)


def _recorded(record: Path) -> dict[str, Any]:
    try:
        files: dict[str, Any] = json.loads(record.read_text())["files"]
        assert all({"bytes", "sha256"} <= facts.keys() for facts in files.values())
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        remedy = "is not the record of a download; remove it and the folder that it describes"
        raise CasemateError("--to", record, remedy) from error
    return files


def _check(folder: Path, files: Mapping[str, Any]) -> None:
    """Raise an error that names the first file that is missing or has changed."""
    damaged = [name for name, facts in files.items() if not _is_intact(folder / name, facts)]
    if damaged:
        others = f" (and {len(damaged) - 1} more)" if len(damaged) > 1 else ""
        state = "has changed since the download" if (folder / damaged[0]).exists() else "is missing"
        remedy = f"{state}{others}; remove {folder} and get it again"
        raise CasemateError("--to", folder / damaged[0], remedy)


def _is_intact(path: Path, facts: Mapping[str, Any]) -> bool:
    whole = path.is_file() and path.stat().st_size == facts["bytes"]
    return whole and digest_file(path) == facts["sha256"]


def _recognised(name: str, wanted: Download, folder: Path) -> dict[str, Any]:
    """The files of a copy without a record, if all of them have published checksums."""
    from torchvision.datasets.utils import check_integrity

    known = wanted.md5s()
    if not known:
        remedy = "was not downloaded by this command, so that nothing tells whether it is whole; "
        raise CasemateError("--to", folder, f"{remedy}use it as it is, or choose another folder")
    for file, md5 in known.items():
        if not check_integrity(folder / file, md5):
            state = "does not have the published checksum"
            state = state if (folder / file).exists() else "is missing"
            remedy = f"{state}; remove {folder} and get it again"
            raise CasemateError("--to", folder / file, remedy)
    return {file: facts for file, facts in _facts(folder).items() if file in known}


def _facts(folder: Path) -> dict[str, Any]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": digest_file(path),
        }
        for path in files
    }


def _copy(folder: Path, files: Mapping[str, Any], *, was_there: bool) -> Downloaded:
    num_bytes = sum(facts["bytes"] for facts in files.values())
    return Downloaded(folder, len(files), num_bytes, was_there)


# --- a new copy -------------------------------------------------------------------------------


def _fetched(name: str, wanted: Download, root: Path, report: Report) -> Downloaded:
    """Download, verify, unpack, publish."""
    made = _make_folders(root)
    try:
        with _staging(root, name) as staging:
            packed, unpacked = staging / "packed", staging / "unpacked" / wanted.folder
            archives = wanted.archives()
            _check_room(name, wanted, root, packed)
            for archive in archives:
                _fetch(archive, packed, report)
            report(f"unpacking {', '.join(archive.name for archive in archives)}")
            wanted.unpack(packed, archives, unpacked)
            files = _facts(unpacked)
            write_json(_record_of(name, root), {"files": files, "name": name})
            move_folder(unpacked, root / wanted.folder)
            shutil.rmtree(packed)
    finally:
        for folder in made:
            with suppress(OSError):  # not empty
                folder.rmdir()
    return _copy(root / wanted.folder, files, was_there=False)


def _make_folders(root: Path) -> list[Path]:
    """Make `root`; returns the folders that were not there, the innermost first."""
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    root.mkdir(parents=True, exist_ok=True)
    return missing


@contextmanager
def _staging(root: Path, name: str) -> Iterator[Path]:
    """A hidden folder with empty `unpacked`, for one process at a time.

    Afterwards it is removed, unless `packed` holds archives for the next call to continue with.
    """
    folder = root / f".{name}.download"
    folder.mkdir(exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder / "unpacked", ignore_errors=True)  # of a call that was killed
        (folder / "unpacked").mkdir()
        (folder / "packed").mkdir(exist_ok=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder / "unpacked", ignore_errors=True)
            with suppress(OSError):  # not empty
                (folder / "packed").rmdir()
            with suppress(OSError):
                folder.rmdir()
    except BlockingIOError as error:
        raise CasemateError("--to", root, "is being filled by another process; wait") from error
    finally:
        os.close(lock)


def _check_room(name: str, wanted: Download, root: Path, packed: Path) -> None:
    there = sum(path.stat().st_size for path in packed.iterdir()) // MEGABYTE
    free = shutil.disk_usage(root).free // MEGABYTE
    if (needed := wanted.megabytes - there) > free:
        remedy = f"has {free:,} MB free, and {name} needs about {needed:,} MB while it is unpacked"
        raise CasemateError("--to", root, remedy)


def _fetch(archive: Archive, folder: Path, report: Report) -> None:
    """An archive with the published checksum in `folder`, or an error and no archive."""
    from torchvision.datasets.utils import check_integrity

    path = folder / archive.name
    if check_integrity(path, archive.md5):
        report(f"{archive.name} was downloaded before, its checksum is right")
        return
    path.unlink(missing_ok=True)  # the part of a call that was killed
    failures = []
    for url in archive.urls:
        report(f"downloading {url}")
        try:
            failure = _failure_of(url, archive, folder)
        except BaseException:  # Ctrl-C too
            path.unlink(missing_ok=True)
            raise
        if failure is None:
            return
        path.unlink(missing_ok=True)
        failures.append(failure)
    raise failures[0]


def _failure_of(url: str, archive: Archive, folder: Path) -> CasemateError | None:
    """Download from one address; what went wrong, if anything."""
    from torchvision.datasets.utils import calculate_md5, download_url

    path = folder / archive.name
    try:
        with _impatient():
            download_url(url, folder, archive.name, archive.md5)
    except HTTPError as error:
        return CasemateError("data get", url, f"answers {error.code} {error.reason}; {_ELSEWHERE}")
    except (URLError, HTTPException, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", None) or error
        return CasemateError("data get", url, f"cannot be reached ({reason}); {_ELSEWHERE}")
    except RuntimeError as error:  # its own check
        if not path.is_file():
            return CasemateError("data get", url, f"fails: {first_line(error)}; {_ELSEWHERE}")
        size, found = path.stat().st_size, calculate_md5(path)
        told = f"gave {size:,} bytes with md5 {found} in place of {archive.md5}"
        return CasemateError("data get", url, f"{told}; they were removed, try again")
    return None


_ELSEWHERE = "run this where the address can be reached, then copy the folder"


@contextmanager
def _impatient() -> Iterator[None]:
    """Connections that stay silent fail instead of waiting without end."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SILENCE_SECONDS)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _extract(archive: Path, folder: Path) -> None:
    from torchvision.datasets.utils import extract_archive

    extract_archive(str(archive), str(folder))
