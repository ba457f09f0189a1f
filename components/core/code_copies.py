"""Copies of user code: its files, their digest and where copies are kept.

Files are found by parsing (`ast`); nothing is imported. A copy is a folder `casemate_user_<digest>`
with exactly those files. See `user_code.py` for how they are used.
"""

import ast
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple

from components.core.digests import digest_bytes
from components.core.files import move_folder

FOLDER = "casemate_user_"  # followed by the digest: workers look for this name
CACHE_ENV = "CASEMATE_USER_CODE"  # folder of the copies
OURS = frozenset({"components", "pipelines"})  # never copied: workers have them
_further_places: list[Path] = []  # folders that may hold copies, besides the cache


class Located(NamedTuple):
    """Files of user code: `first` is the named one; all are below `root`."""

    root: Path
    first: Path
    files: tuple[Path, ...]
    installed: bool


def cache_folder() -> Path:
    """Folder of the copies on this machine."""
    usual = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "casemate/user_code"
    return Path(os.environ.get(CACHE_ENV, usual)).absolute()


def copy_of(digest: str) -> Path | None:
    """The folder with the code of that digest, if it is on this machine."""
    name = f"{FOLDER}{digest}"
    found = [place / name for place in (cache_folder(), *_further_places)]
    spec = PathFinder.find_spec(name)
    found += [Path(place) for place in (spec.submodule_search_locations or [] if spec else [])]
    return next((folder for folder in found if folder.is_dir()), None)


def file_of_copies(name: str) -> Path | None:
    """A single file among the copies on this machine."""
    places = (cache_folder(), *_further_places)
    return next((place / name for place in places if (place / name).is_file()), None)


def look_in(folder: Path) -> None:
    """Add a folder in which copies are searched, such as the one beside a model's weights."""
    if folder.is_dir() and folder not in _further_places:
        _further_places.append(folder)


def copy_below(digest: str, folder: Path) -> None:
    """Copy the code of a digest below another folder; installed code has no copy."""
    origin = copy_of(digest)
    if origin is not None and origin.parent != folder:
        _copy_files(code_files(origin), origin, folder / origin.name)


def code_files(copy: Path) -> list[Path]:
    """The files of a copy in their order."""
    return sorted(copy.rglob("*.py"))


def locate(place: str, base: Path) -> Located:
    """The files behind `file.py`, as seen from `base`, or `package.module`.

    Raises `LookupError` with a message that names what is missing.
    """
    if place.endswith(".py"):
        first = (base / Path(place).expanduser()).resolve()
        if not first.is_file():
            raise LookupError(f"names a file that does not exist: {first}")
        root, inside, installed = first.parent, first.parent, False
    else:
        root, first = _module_file(place, base)
        installed = bool({"site-packages", "dist-packages"} & set(root.parts))
        inside = root / place.partition(".")[0] if installed else root
    try:
        files = source_files(first, root, inside=inside)
    except (SyntaxError, ValueError, OSError) as error:
        raise LookupError(f"cannot be read: {' '.join(str(error).split())}") from error
    return Located(root, first, files, installed)


def _module_file(place: str, base: Path) -> tuple[Path, Path]:
    """Root and file of `package.module`, found without importing the package."""
    top, *rest = place.split(".")
    spec = PathFinder.find_spec(top, [str(base.resolve()), *sys.path])
    if spec and spec.submodule_search_locations:
        folder = Path(next(iter(spec.submodule_search_locations))).resolve()
        root, stem = folder.parent, folder.joinpath(*rest)
        tries = [stem / "__init__.py", *([stem.with_name(f"{stem.name}.py")] if rest else [])]
    elif spec and spec.origin and not rest:
        root, tries = Path(spec.origin).resolve().parent, [Path(spec.origin).resolve()]
    else:
        root, tries = base, []
    first = next((path for path in tries if path.suffix == ".py" and path.is_file()), None)
    if first is None:
        raise LookupError(f"names a module that is not found here: {place}; or name its file")
    return root, first


def source_files(first: Path, root: Path, *, inside: Path) -> tuple[Path, ...]:
    """A file and all that it imports, directly or not, from below `inside`; found by parsing."""
    found: set[Path] = set()
    todo = [first]
    while todo:
        path = todo.pop()
        if path in found or not path.is_relative_to(inside):
            continue
        found.add(path)
        above = path.parent
        while above != root and (above / "__init__.py").is_file():
            todo.append(above / "__init__.py")
            above = above.parent
        for node in ast.walk(ast.parse(path.read_bytes(), filename=path.name)):
            todo += _imported_files(node, path, root)
    return tuple(sorted(found))


def _imported_files(node: ast.AST, path: Path, root: Path) -> Iterator[Path]:
    """Files below `root` that an import statement may load."""
    place = root
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [".".join(filter(None, [node.module, alias.name])) for alias in node.names]
        names += [node.module] if node.module else []
        if node.level:
            place = path.parents[min(node.level, len(path.parents)) - 1]
    else:
        return
    for name in names:
        if place == root and name.partition(".")[0] in OURS:
            continue
        stem = place.joinpath(*name.split("."))
        tries = (stem.with_name(f"{stem.name}.py"), stem / "__init__.py")
        yield from (file for file in tries if file.is_file())


def clash(located: Located) -> str | None:
    """A message if a module has the name of another one that Python might import instead."""
    if located.installed:
        return None
    elsewhere = [
        place
        for place in sys.path
        if Path(place).resolve() != located.root and not Path(place).name.startswith(FOLDER)
    ]
    for name in sorted(top_names(located.files, located.root)):
        if name in sys.stdlib_module_names:
            return f"module {name} has the name of a module of the standard library"
        if name in OURS:
            return f"module {name} has the name of a package of casemate"
        if spec := PathFinder.find_spec(name, elsewhere):
            return f"module {name} has the name of another one: {spec.origin or name}"
    return None


def top_names(files: Iterable[Path], root: Path) -> set[str]:
    """Names of the modules and packages directly below `root`."""
    return {path.relative_to(root).parts[0].removesuffix(".py") for path in files}


def digest_of(files: Iterable[Path], root: Path) -> str:
    """Digest of relative names and bytes."""
    chunks = [part for f in files for part in (f.relative_to(root).as_posix().encode(), f)]
    return digest_bytes(*(c.read_bytes() if isinstance(c, Path) else c for c in chunks))[:16]


def copy_to_cache(located: Located, digest: str) -> None:
    """Copy the files to the cache, unless there is a copy with this digest."""
    target = cache_folder() / f"{FOLDER}{digest}"
    if not target.is_dir():
        _copy_files(list(located.files), located.root, target)


def _copy_files(files: list[Path], root: Path, target: Path) -> None:
    """Copy all files or none: a complete copy is renamed to its final name."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=".partial-"))
    try:
        for path in files:
            place = partial / path.relative_to(root)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
        partial.chmod(0o755)
        if not target.is_dir():
            move_folder(partial, target)
    except OSError:
        if not target.is_dir():  # else another process was faster
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
