"""User code, referenced as `python:file.py:Name` or `python:package.module:Name`.

A reference is pinned before it is used: the file and all that it imports from its own folder are
found by parsing (`ast`, nothing is run), copied to a folder `casemate_user_<digest>` and named by
their content: `python:file.py@<digest>:Name`. Code is imported from such a copy only, also on this
machine: a file that was not copied is an error before the run, not on a worker. Each copy is a
package of its own (`copy_imports.py`), so copies do not see each other's modules. Resolved recipes,
fingerprints, model folders and workers hold the pinned form: they depend on the content of the
code, not on its location, and a changed file has a different digest.

Installed packages (site-packages) are not copied; their digest is compared where they are imported.
Light to import: no numerical library is loaded.
"""

import importlib
import inspect
import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

from components.core.code_copies import (
    FOLDER,
    Located,
    clash,
    code_files,
    copy_below,
    copy_of,
    copy_to_cache,
    digest_of,
    locate,
)
from components.core.copy_imports import import_from
from components.core.hints import did_you_mean
from components.core.settings import Problem, SettingError, Settings, hints_of, plain, refusals

PREFIX = "python:"
_FORM = re.compile(r"python:(?P<place>[^:@]+?)(@(?P<digest>[0-9a-f]{16}))?:(?P<name>\w+)")


class Reading(NamedTuple):
    """How references are resolved while a recipe is read."""

    base: Path = Path()  # file names are relative to it
    trusted: bool = True  # False: nothing is resolved, copied or imported


_reading: ContextVar[Reading] = ContextVar("reading", default=Reading())  # noqa: B039 (immutable)
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
    """Whether a value is a reference to user code."""
    return isinstance(value, str) and value.startswith(PREFIX)


def references(values: Any) -> list[str]:
    """All references inside plain values, without repetitions, in order."""
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


def with_absolute_files(values: Any, base: Path) -> Any:
    """Plain values with the file names of references made absolute, relative to `base`."""
    if isinstance(values, dict):
        return {key: with_absolute_files(value, base) for key, value in values.items()}
    if isinstance(values, list):
        return [with_absolute_files(value, base) for value in values]
    form = _FORM.fullmatch(values) if is_reference(values) else None
    if not form or form["digest"] or not form["place"].endswith(".py"):
        return values
    place = (base / Path(form["place"]).expanduser()).resolve()
    return str(Reference(str(place), None, form["name"]))


def pinned(text: str, *, field: str) -> str:
    """A reference with its digest; other text, and untrusted references, unchanged."""
    if not is_reference(text) or not is_trusted():
        return text
    reference = _parsed(text, field=field)
    if reference.digest:
        _folder_of(reference, field=field)
        return text
    located = _located(reference, field=field)
    if found := clash(located):
        raise _refusal(field, text, f"cannot be imported: {found}; rename it")
    digest = digest_of(located.files, located.root)
    if not located.installed:
        copy_to_cache(located, digest)
    place = located.first.name if reference.place.endswith(".py") else reference.place
    return str(Reference(place, digest, reference.name))


def pinned_inside(values: Any, *, field: str = "") -> Any:
    """Plain values with all references pinned; `field` is the path of the values."""
    above = f"{field}." if field else ""
    if isinstance(values, dict):
        return {key: pinned_inside(x, field=f"{above}{key}") for key, x in values.items()}
    if isinstance(values, list):
        return [pinned_inside(x, field=f"{above}{number}") for number, x in enumerate(values)]
    return pinned(values, field=field) if is_reference(values) else values


def load(text: str, *, field: str) -> Any:
    """Import and return the object of a reference; this runs its module."""
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
    """The frozen dataclass `Settings` of the referenced object."""
    own = getattr(load(text, field=field), "Settings", None)
    if not (isinstance(own, type) and is_dataclass(own)):
        name = text.rpartition(":")[2]
        remedy = f"has no settings: give {name} an attribute Settings, a frozen dataclass"
        raise _refusal(field, text, remedy)
    if not getattr(own, "__dataclass_params__").frozen:  # noqa: B009 (unknown to mypy)
        remedy = "has mutable settings: write @dataclass(frozen=True)"
        raise _refusal(field, text, remedy)
    return own


def argument_names(text: str, *, field: str) -> set[str] | None:
    """Names of the arguments that the referenced object takes; None: any."""
    parameters = _parameters(load(text, field=field), text, field=field)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}


def checked_options(
    text: str,
    options: Mapping[str, Any],
    *,
    field: str,
    given: tuple[str, ...] = (),
    also: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Options as arguments of the referenced object, checked against its Settings or signature.

    The caller always passes `given` and sometimes `also`. Problems name `options.<key>`.
    """
    target = load(text, field=field)
    if hasattr(target, "Settings"):
        own = settings_class(text, field=field)
        made = _made(own, options)
        return {f.name: getattr(made, f.name) for f in fields(own)}
    parameters = _parameters(target, text, field=field)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(options)
    named = [p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if missing := sorted(set(given) - {p.name for p in named}):
        raise _refusal(field, text, f"needs an argument {missing[0]}; add it")
    free = {p.name: p for p in named if p.name not in (*given, *also)}
    needed = [name for name, p in free.items() if p.default is p.empty]
    _refuse_keys(options, free, needed)
    return dict(options)


def _parameters(target: Any, text: str, *, field: str) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError) as error:
        raise _refusal(field, text, f"cannot be called: {error}") from error


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
    """A recipe entry whose kind is user code: `{kind: python:..., **settings}`.

    Pickled as reference and settings: workers import the code from their copy.
    """

    kind: str  # pinned
    settings: Any  # of the class `Settings`; in an untrusted recipe: a plain mapping

    def load(self) -> Any:
        """The user's class or function."""
        return load(self.kind, field="kind")

    def plain_fields(self) -> dict[str, Any]:
        inner = self.settings
        values = inner if isinstance(inner, Mapping) else plain(inner)
        return {"kind": self.kind, **values}

    def __reduce__(self) -> tuple[Any, ...]:
        return _entry_on_worker, (type(self), self.kind, pickle.dumps(self.settings))


def _entry_on_worker(cls: type[UserEntry], kind: str, settings: bytes) -> UserEntry:
    load(kind, field="kind")  # first: the class of the settings is in that module
    return cls(kind=kind, settings=pickle.loads(settings))


def copy_code(text: str, folder: Path) -> None:
    """Copy the code of a pinned reference below a folder; installed code is not copied."""
    copy_below(_parsed(text, field="").digest or "", folder)


def _parsed(text: str, *, field: str) -> Reference:
    form = _FORM.fullmatch(text)
    if not form or not form["name"].isidentifier():
        remedy = "is not of the form python:file.py:Name or python:package.module:Name"
        raise _refusal(field, text, remedy)
    return Reference(form["place"], form["digest"], form["name"])


def _located(reference: Reference, *, field: str) -> Located:
    try:
        return locate(reference.place, _reading.get().base)
    except LookupError as error:
        raise _refusal(field, reference, str(error)) from error


def _folder_of(reference: Reference, *, field: str) -> Path | None:
    """The copy of a pinned reference; None: installed code with the same digest."""
    assert reference.digest is not None
    if folder := copy_of(reference.digest):
        if digest_of(code_files(folder), folder) != reference.digest:
            remedy = f"has a modified copy: {folder}; remove that folder"
            raise _refusal(field, reference, remedy)
        return folder
    if not reference.place.endswith(".py"):
        located = _located(reference._replace(digest=None), field=field)
        if located.installed and digest_of(located.files, located.root) == reference.digest:
            return None
        if located.installed:
            raise _refusal(field, reference, "is installed here in another version")
    remedy = f"has no code on this machine: {FOLDER}{reference.digest} is missing; name its file"
    raise _refusal(field, reference, remedy)


def _imported(reference: Reference, folder: Path | None, *, field: str) -> Any:
    """The module of a pinned reference, imported from its copy."""
    assert reference.digest is not None
    key = (reference.digest, reference.module)
    if key not in _modules:
        try:
            importlib.invalidate_caches()
            _modules[key] = (
                import_from(folder, reference.module)
                if folder
                else importlib.import_module(reference.module)
            )
        except (Exception, SystemExit) as error:
            remedy = f"fails to import: {type(error).__name__}: {' '.join(str(error).split())}"
            raise _refusal(field, reference, remedy) from error
    return _modules[key]


def _refusal(field: str, reference: object, remedy: str) -> SettingError:
    return SettingError(Problem(field, repr(str(reference)), remedy))
