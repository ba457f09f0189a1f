"""Whether a file is still the one that was listed."""

from pathlib import Path

from components.core.errors import CasemateError


def unreachable(path: Path, error: OSError) -> CasemateError:
    """Not the item's fault, so never skipped: the disk is not there, or not for us."""
    remedy = f"cannot be read here ({error.strerror}); every worker must see data.path"
    return CasemateError("data.path", path, remedy)


def file_version(path: Path) -> str:
    """Size and modification time: enough to notice that a file was replaced."""
    try:
        stat = path.stat()
    except OSError as error:
        raise unreachable(path, error) from error
    return f"{stat.st_size}-{stat.st_mtime_ns}"


def check_unchanged(path: Path, version: str) -> None:
    """What a worker opens is what the driver listed."""
    if file_version(path) != version:
        raise CasemateError("data.path", path, "changed while it was read; start again")
