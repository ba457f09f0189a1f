"""What is known of a source without opening it: its options, images, splits and opener."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from components.core.errors import CasemateError
from components.core.object_stores import is_uri, uri_problem

if TYPE_CHECKING:
    from components.data.sources.base import Source

SPLITS = ("train", "val", "test")
_YAML_WORDS = {
    bool: "true or false",
    int: "a whole number",
    str: "a string",
    list: "a list",
    dict: "a mapping",
    type(None): "null",
}


@dataclass(frozen=True, slots=True)
class Option:
    """One key of `data.options`; `kinds` are the YAML types it may have."""

    name: str
    kinds: tuple[type, ...]
    help: str
    required: bool = False
    is_file: bool = False  # its content is part of the data's identity
    built_in: tuple[str, ...] = ()  # words that never name a file
    default: int | None = None
    fact: str | None = None  # the field or split of the source that it determines


def _load(name: str) -> Any:
    """The function `module:function` below this package."""
    module, _, function = name.partition(":")
    return getattr(import_module(f"{__package__}.{module}"), function)


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """One source as `casemate data` shows it."""

    name: str
    title: str
    open: str  # "module:function", below this package
    path_help: str | None  # description of data.path; None: no files are read
    num_classes: int | None = None  # None: depends on the files
    side: int | None = None  # side of all images, which are square; None: varies
    channels: int | None = None  # None: varies, or depends on the files
    splits: Mapping[str, int] | None = None  # items as published; None: depends on the files
    options: tuple[Option, ...] = ()
    used_by: tuple[str, ...] = ()
    path: Literal["none", "needed", "optional"] = "needed"
    test_only: bool = False
    by_name: bool = False  # one entry for many names: its opener gets the name
    checks: str | None = None  # "module:function" that checks options which are not listed here
    is_cheap: bool = False  # opening reads nothing, so that the gate does it
    remote: bool = True  # data.path may be a URI

    def opener(self) -> "Callable[..., Source]":
        """The function that opens it."""
        found: Callable[..., Source] = _load(self.open)
        return found

    def with_options(self, options: Mapping[str, Any]) -> "SourceInfo":
        """The source with the facts that its options determine."""
        found: dict[str, Any] = {
            o.fact: options.get(o.name, o.default) for o in self.options if o.fact
        }
        splits: dict[str, int] = {s: found.pop(s) for s in SPLITS if s in found}
        return replace(self, **found, splits=splits or self.splits)

    @property
    def image_size(self) -> str:
        """Height, width and colour as text."""
        if self.side is None:
            return "varies"
        return f"{self.side}x{self.side}" + (" grey" if self.channels == 1 else "")

    @property
    def num_items(self) -> int | None:
        return None if self.splits is None else sum(self.splits.values())

    def facts(self) -> dict[str, Any]:
        """Plain values, for people and for JSON."""
        return {
            "name": self.name,
            "title": self.title,
            "classes": self.num_classes,
            "image_size": self.image_size,
            "num_items": self.num_items,
            "splits": None if self.splits is None else dict(self.splits),
            "test_only": self.test_only,
            "path": self.path_help,
            "options": {option.name: option.help for option in self.options},
            "used_by": list(self.used_by),
        }


def path_problem(info: SourceInfo, path: str | None) -> str | None:
    """What is wrong with the form of a path or URI, as a remedy."""
    if path is None:
        return None
    if is_uri(path) and not info.remote:
        return f"is a URI; source {info.name} needs a folder of the machines"
    return uri_problem(path)


def check_place(info: SourceInfo, path: str | None) -> None:
    """Raise an error for a path or URI that cannot be one of this source."""
    if problem := path_problem(info, path):
        raise CasemateError("data.path", path, problem)


def check_options(info: SourceInfo, options: Mapping[str, Any]) -> None:
    """Raise an error for unknown keys, wrong types and missing required options."""
    if info.checks:
        _load(info.checks)(info.name, options)
        return
    known = {option.name: option for option in info.options}
    for key, value in options.items():
        where = f"data.options.{key}"
        if key not in known:
            allowed = ", ".join(known) or "none"
            remedy = f"is not an option of source {info.name}; allowed: {allowed}"
            raise CasemateError(where, value, remedy)
        if type(value) not in known[key].kinds:  # exact: true is not a number
            names = " or ".join(_YAML_WORDS[kind] for kind in known[key].kinds)
            raise CasemateError(where, repr(value), f"must be {names}: {known[key].help}")
        if isinstance(value, list) and not all(isinstance(word, str) for word in value):
            raise CasemateError(where, value, "must be a list of strings; put them in quotes")
    for option in info.options:
        if option.required and option.name not in options:
            raise CasemateError(f"data.options.{option.name}", None, f"must be set: {option.help}")
