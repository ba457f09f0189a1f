"""The rule for `--out` of all commands that write pages and recipes: the ending says what."""

from collections.abc import Sequence
from pathlib import Path

from components.core.errors import CasemateError

OUT = "--out"


def output_file(out: str | Path, endings: Sequence[str]) -> Path:
    """The file to write: one of these endings, in a folder that exists."""
    path = Path(out).expanduser()
    if path.suffix not in endings:
        raise CasemateError(OUT, out, _wrong_ending(endings))
    if path.is_dir():
        raise CasemateError(OUT, out, "is a folder; name a file")
    return _placed(path)


def output_file_or_folder(out: str | Path, endings: Sequence[str]) -> Path:
    """The same, or a folder: one that exists, or a name without an ending."""
    path = Path(out).expanduser()
    if path.suffix in endings:
        return output_file(out, endings)
    if path.is_file() or (path.suffix and not path.is_dir()):
        remedy = f"{_wrong_ending(endings)}; a new folder has a name without an ending"
        raise CasemateError(OUT, out, remedy)
    return _placed(path)


def _wrong_ending(endings: Sequence[str]) -> str:
    if len(endings) == 1:
        return f"does not end in {endings[0]}"
    return f"ends in neither {' nor '.join(endings)}"


def _placed(path: Path) -> Path:
    if not path.parent.is_dir():
        raise CasemateError(OUT, path, f"cannot be written: {path.parent} is not a folder")
    return path
