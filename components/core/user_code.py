"""Code of the user's own, named as `python:file.py:Name` or `python:package.module:Name`.

A reference is pinned before it is used: the file and all that it imports from its own folder are
found by reading (`ast`, nothing is run), copied to a folder `casemate_user_<digest>` and named by
their content: `python:file.py@<digest>:Name`. Code is imported from such a copy only, on this
machine too. What was not copied is missing there, so it fails before a run and not on a worker.
Resolved recipes, fingerprints, model folders and workers hold the pinned form: they depend on what
the code says, not on where it lay, and a changed file is another digest.

Installed packages (site-packages) are not copied; their digest is compared where they are imported.
Light to import: no numerical library is loaded.
"""

import ast
import importlib
import importlib.util
import inspect
import os
import pickle
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple

from components.core.digests import digest_bytes
from components.core.hints import did_you_mean
from components.core.settings import Problem, SettingError, Settings, hints_of, plain, refusals

PREFIX = "python:"
FOLDER = "casemate_user_"  # and the digest: a name that workers can look for
CACHE_ENV = "CASEMATE_USER_CODE"  # folder of the copies
OURS = frozenset({"components", "pipelines"})  # never copied: workers have them
_FORM = re.compile(r"python:(?P<place>[^:@]+?)(@(?P<digest>[0-9a-f]{16}))?:(?P<name>\w+)")


class Reading(NamedTuple):
    """How references are understood while a recipe is read."""

    base: Path = Path()  # file names are relative to it
    trusted: bool = True  # False: nothing is resolved, copied or imported


_reading: ContextVar[Reading] = ContextVar("reading", default=Reading())  # noqa: B039 (immutable)
_further_places: list[Path] = []  # folders that may hold copies, besides the cache
_modules: dict[tuple[str, str], Any] = {}  # by digest and module


class Reference(NamedTuple):
    """A reference in its parts; `digest` is None until it is pinned."""

    place: str  # file.py or package.module
    digest: str | None
    name: str

    def __str__(self) -> str:
        return f"{PREFIX}{self.place}{f'@{self.digest}' if self.digest else ''}:{self.name}"

    @property
    def module(self) -> str:
        return self.place.removesuffix(".py")


class Located(NamedTuple):
    """Files behind a reference: `first` is the named one; all are below `root`."""

    root: Path
    first: Path
    files: tuple[Path, ...]
    installed: bool


@contextmanager
def reading(*, base: Path, trusted: bool) -> Iterator[None]:
    """References are relative to `base`; those that are not trusted stay plain text."""
    token = _reading.set(Reading(base, trusted))
    try:
        yield
    finally:
        _reading.reset(token)


def is_trusted() -> bool:
    """Whether references may be resolved now."""
    return _reading.get().trusted


def is_reference(value: object) -> bool:
    """Whether a value names code of the user's own."""
    return isinstance(value, str) and value.startswith(PREFIX)


def references(values: Any) -> list[str]:
    """Every reference inside plain values, each once, in their order."""
    if isinstance(values, Mapping):
        inner = [found for value in values.values() for found in references(value)]
    elif isinstance(values, list | tuple):
        inner = [found for value in values for found in references(value)]
    else:
        inner = [values] if is_reference(values) else []
    return list(dict.fromkeys(inner))


def digests(values: Any) -> list[str]:
    """The digests of all pinned references inside plain values."""
    found = [_parsed(text, field="").digest for text in references(values)]
    return list(dict.fromkeys(digest for digest in found if digest))


def seen_from(values: Any, base: Path) -> Any:
    """Plain values with file names of references made absolute, as seen from `base`."""
    if isinstance(values, dict):
        return {key: seen_from(value, base) for key, value in values.items()}
    if isinstance(values, list):
        return [seen_from(value, base) for value in values]
    form = _FORM.fullmatch(values) if is_reference(values) else None
    if not form or form["digest"] or not form["place"].endswith(".py"):
        return values
    place = (base / Path(form["place"]).expanduser()).resolve()
    return str(Reference(str(place), None, form["name"]))


def pinned(text: str, *, field: str) -> str:
    """A reference with its digest; other text, and text that is not trusted, as it is."""
    if not is_reference(text) or not is_trusted():
        return text
    reference = _parsed(text, field=field)
    if reference.digest:
        _folder_of(reference, field=field)
        return text
    located = _located(reference, field=field)
    _refuse_clashes(reference, located, field=field)
    digest = _digest(located.files, located.root)
    if not located.installed:
        _stage(located, digest)
    place = located.first.name if reference.place.endswith(".py") else reference.place
    return str(Reference(place, digest, reference.name))


def load(text: str, *, field: str) -> Any:
    """The object that a reference names; importing its module runs it."""
    reference = _parsed(pinned(text, field=field), field=field)
    if not reference.digest:
        raise _refusal(field, text, "is not trusted here; its code is not run")
    folder = _folder_of(reference, field=field)
    module = _imported(reference, folder, field=field)
    found = getattr(module, reference.name, None)
    if found is None:
        home = module.__name__
        own = [name for name, x in vars(module).items() if getattr(x, "__module__", "") == home]
        remedy = f"cannot be found: {reference.name} {did_you_mean(reference.name, own)}"
        raise _refusal(field, text, remedy)
    return found


def settings_class(text: str, *, field: str) -> type:
    """The frozen dataclass `Settings` of what a reference names."""
    own = getattr(load(text, field=field), "Settings", None)
    if not (isinstance(own, type) and is_dataclass(own)):
        name = text.rpartition(":")[2]
        remedy = f"has no settings: give {name} an attribute Settings, a frozen dataclass"
        raise _refusal(field, text, remedy)
    if not getattr(own, "__dataclass_params__").frozen:  # noqa: B009 (unknown to mypy)
        remedy = "has settings that can be changed: write @dataclass(frozen=True)"
        raise _refusal(field, text, remedy)
    return own


def checked_options(
    text: str,
    options: Mapping[str, Any],
    *,
    field: str,
    given: tuple[str, ...] = (),
    also: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Options as arguments of what a reference names, checked against its Settings or signature.

    The caller passes `given` itself, always, and `also` sometimes. Problems name `options.<key>`.
    """
    target = load(text, field=field)
    if hasattr(target, "Settings"):
        own = settings_class(text, field=field)
        made = _made(own, options)
        return {f.name: getattr(made, f.name) for f in fields(own)}
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError) as error:
        raise _refusal(field, text, f"cannot be called: {error}") from error
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(options)
    named = [p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if missing := sorted(set(given) - {p.name for p in named}):
        raise _refusal(field, text, f"takes no argument {missing[0]}; give it one")
    free = {p.name: p for p in named if p.name not in (*given, *also)}
    needed = [name for name, p in free.items() if p.default is p.empty]
    _refuse_keys(options, free, needed)
    return dict(options)


def _made(own: type, options: Mapping[str, Any]) -> Any:
    needed = [f.name for f in fields(own) if f.default is MISSING and f.default_factory is MISSING]
    _refuse_keys(options, [f.name for f in fields(own)], needed)
    hints = hints_of(own)
    wrong = [
        Problem(f"options.{key}", repr(value), why)
        for key, value in options.items()
        for why in refusals(tuple(value) if isinstance(value, list) else value, hints[key])
    ]
    if wrong:
        raise SettingError(*wrong)
    try:
        return own(**options)
    except SettingError as error:
        found = [p._replace(field=f"options.{p.field}") for p in error.problems]
        raise SettingError(*found) from error


def _refuse_keys(options: Mapping[str, Any], known: Any, needed: list[str]) -> None:
    found = [
        Problem(f"options.{key}", repr(options[key]), did_you_mean(key, known))
        for key in options
        if key not in known
    ]
    found += [
        Problem(f"options.{key}", "", "is missing; write it")
        for key in needed
        if key not in options
    ]
    if found:
        raise SettingError(*found)


@dataclass(frozen=True, kw_only=True)
class UserEntry(Settings):
    """An entry of a recipe whose kind is the user's own: `{kind: python:..., **settings}`.

    It travels to workers as its reference and its settings: they import the code from their copy.
    """

    kind: str  # pinned
    settings: Any  # of the class `Settings`; of a recipe that is not trusted: a plain mapping

    def load(self) -> Any:
        """The class or function of the user's."""
        return load(self.kind, field="kind")

    def plain_fields(self) -> dict[str, Any]:
        inner = self.settings
        values = inner if isinstance(inner, Mapping) else plain(inner)
        return {"kind": self.kind, **values}

    def __reduce__(self) -> tuple[Any, ...]:
        return _entry_on_worker, (type(self), self.kind, pickle.dumps(self.settings))


def _entry_on_worker(cls: type[UserEntry], kind: str, settings: bytes) -> UserEntry:
    load(kind, field="kind")  # first: the settings are of a class in that module
    return cls(kind=kind, settings=pickle.loads(settings))


def cache_folder() -> Path:
    """Where copies of user code are kept on this machine."""
    usual = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "casemate/user_code"
    return Path(os.environ.get(CACHE_ENV, usual)).absolute()


def copy_of(digest: str) -> Path | None:
    """The folder with the code of that digest, if it is on this machine."""
    name = f"{FOLDER}{digest}"
    found = [place / name for place in (cache_folder(), *_further_places)]
    spec = PathFinder.find_spec(name)
    found += [Path(place) for place in (spec.submodule_search_locations or [] if spec else [])]
    return next((folder for folder in found if folder.is_dir()), None)


def look_in(folder: Path) -> None:
    """Also look for copies in a folder, such as the one beside a model's weights."""
    if folder.is_dir() and folder not in _further_places:
        _further_places.append(folder)


def copy_code(text: str, folder: Path) -> None:
    """Put the copy behind a pinned reference below a folder; installed code is not copied."""
    reference = _parsed(text, field="")
    origin = copy_of(reference.digest or "")
    if origin is None or origin.parent == folder:
        return
    _copy_files(sorted(origin.rglob("*.py")), origin, folder / origin.name)


def _parsed(text: str, *, field: str) -> Reference:
    form = _FORM.fullmatch(text)
    if not form or not form["name"].isidentifier():
        remedy = "is not of the form python:file.py:Name or python:package.module:Name"
        raise _refusal(field, text, remedy)
    return Reference(form["place"], form["digest"], form["name"])


def _located(reference: Reference, *, field: str) -> Located:
    """The files behind a reference that is not pinned yet."""
    base = _reading.get().base
    if reference.place.endswith(".py"):
        first = (base / Path(reference.place).expanduser()).resolve()
        if not first.is_file():
            raise _refusal(field, reference, f"names a file that does not exist: {first}")
        root, inside, installed = first.parent, first.parent, False
    else:
        root, first = _module_file(reference, base, field=field)
        installed = bool({"site-packages", "dist-packages"} & set(root.parts))
        inside = root / reference.module.partition(".")[0] if installed else root
    try:
        files = source_files(first, root, inside=inside)
    except (SyntaxError, ValueError, OSError) as error:
        raise _refusal(field, reference, f"cannot be read: {_one_line(error)}") from error
    return Located(root, first, files, installed)


def _module_file(reference: Reference, base: Path, *, field: str) -> tuple[Path, Path]:
    """Root and file of `package.module`, found without importing the package."""
    top, *rest = reference.place.split(".")
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
        remedy = f"names a module that is not found here: {reference.place}; or name its file"
        raise _refusal(field, reference, remedy)
    return root, first


def source_files(first: Path, root: Path, *, inside: Path) -> tuple[Path, ...]:
    """A file and all that it imports, directly or not, from below `inside`: found by reading."""
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


def _refuse_clashes(reference: Reference, located: Located, *, field: str) -> None:
    """Refuse modules whose name Python gives to another one: the wrong one would be imported."""
    if located.installed:
        return
    elsewhere = [
        place
        for place in sys.path
        if Path(place).resolve() != located.root and not Path(place).name.startswith(FOLDER)
    ]
    for name in sorted(_top_names(located.files, located.root)):
        if name in sys.stdlib_module_names or name in OURS:
            where = "the standard library" if name not in OURS else "casemate"
        elif spec := PathFinder.find_spec(name, elsewhere):
            where = str(spec.origin or name)
        else:
            continue
        remedy = f"needs a module {name}, which is also the name of one of {where}; rename it"
        raise _refusal(field, reference, remedy)


def _top_names(files: tuple[Path, ...], root: Path) -> set[str]:
    return {path.relative_to(root).parts[0].removesuffix(".py") for path in files}


def _digest(files: tuple[Path, ...], root: Path) -> str:
    chunks = [part for f in files for part in (f.relative_to(root).as_posix().encode(), f)]
    return digest_bytes(*(c.read_bytes() if isinstance(c, Path) else c for c in chunks))[:16]


def _stage(located: Located, digest: str) -> None:
    """Copy the files to the cache; equal digests are equal files, so the first copy stays."""
    target = cache_folder() / f"{FOLDER}{digest}"
    if not target.is_dir():
        _copy_files(list(located.files), located.root, target)


def _copy_files(files: list[Path], root: Path, target: Path) -> None:
    """All files or none: a copy is renamed into place when it is complete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=".partial-"))
    try:
        for path in files:
            place = partial / path.relative_to(root)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
        partial.chmod(0o755)
        if not target.is_dir():
            partial.rename(target)
    except OSError:
        if not target.is_dir():  # else another process was faster
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _folder_of(reference: Reference, *, field: str) -> Path | None:
    """The copy behind a pinned reference; None: installed code of the same digest."""
    assert reference.digest is not None
    if folder := copy_of(reference.digest):
        if _digest(tuple(sorted(folder.rglob("*.py"))), folder) != reference.digest:
            remedy = f"has a copy that was changed: {folder}; remove that folder"
            raise _refusal(field, reference, remedy)
        return folder
    if not reference.place.endswith(".py"):
        located = _located(reference._replace(digest=None), field=field)
        if located.installed and _digest(located.files, located.root) == reference.digest:
            return None
        if located.installed:
            raise _refusal(field, reference, "is installed here in another version")
    remedy = f"has no code on this machine: {FOLDER}{reference.digest} is missing; name its file"
    raise _refusal(field, reference, remedy)


def _imported(reference: Reference, folder: Path | None, *, field: str) -> Any:
    """The module behind a pinned reference, imported from its copy."""
    assert reference.digest is not None
    key = (reference.digest, reference.module)
    if key not in _modules:
        try:
            if folder:
                _use_only(folder)
            importlib.invalidate_caches()
            _modules[key] = importlib.import_module(reference.module)
        except Exception as error:
            remedy = f"fails to import: {type(error).__name__}: {_one_line(error)}"
            raise _refusal(field, reference, remedy) from error
    return _modules[key]


def _use_only(folder: Path) -> None:
    """Make a copy importable, and forget modules of the same names: another state of its files.

    The copy stays on the path, for imports inside functions.
    """
    names = _top_names(tuple(folder.rglob("*.py")), folder)
    for name, module in list(sys.modules.items()):
        place = getattr(module, "__file__", None)
        if name.partition(".")[0] in names and not (place and Path(place).is_relative_to(folder)):
            del sys.modules[name]
    sys.path[:] = [str(folder), *(place for place in sys.path if place != str(folder))]


def _refusal(field: str, reference: object, remedy: str) -> SettingError:
    return SettingError(Problem(field, repr(str(reference)), remedy))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
