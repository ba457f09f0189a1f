"""Detection of files that changed after they were listed."""

from pathlib import Path

from components.core.errors import CasemateError


def unreachable(path: Path, error: OSError) -> CasemateError:
    """Error for a file that cannot be opened; never skipped, because the item may be intact."""
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
    """Raise an error if a file has changed since the driver listed it."""
    if file_version(path) != version:
        raise CasemateError("data.path", path, "changed while it was read; start again")
