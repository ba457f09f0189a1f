"""Settings: frozen, self-validating dataclasses; the only place where defaults and ranges are set.

A settings class states each value once: its type with its range, its default and its meaning.
Recipes are read into the same classes that Python code constructs, so both are checked alike:
`__post_init__` checks types and ranges, then `problems()` the rules between fields. Light to
import: reading a recipe needs no numerical library.
"""

import operator
import re
from collections.abc import Collection, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from fractions import Fraction
from functools import cache
from types import UnionType
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from annotated_types import Ge, Gt, Le, Lt, MinLen

T = TypeVar("T")

RUN_SEED = 0  # default seed of a run


class Problem(NamedTuple):
    """One wrong value: `field` is relative to its owner and may be dotted."""

    field: str
    value: object
    remedy: str  # continues the sentence that field and value begin

    def __str__(self) -> str:
        return f"{self.field}: " + " ".join(filter(None, [str(self.value), self.remedy]))


class SettingError(ValueError):
    """Settings that cannot work, with every problem that was found."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__(*problems)  # all as args: survives pickling between workers
        self.problems = problems

    def __str__(self) -> str:
        return "; ".join(map(str, self.problems))


class Fractional:
    """Marks a number that a recipe may also write as a fraction, e.g. 8/255."""

    MAX_LENGTH = 40  # of the text
    EXPONENT = re.compile(r"[eE][+-]?0*[0-9]{4,}")  # a Fraction would compute all its digits

    @classmethod
    def read(cls, value: object) -> float:
        """The number of a value or fraction in a recipe."""
        try:
            if isinstance(value, str):
                return cls._of_text(value.replace(" ", ""))
            if isinstance(value, int | float) and not isinstance(value, bool):
                return float(value)
        except (ValueError, ZeroDivisionError, OverflowError):
            pass
        raise ValueError("is not a number or a fraction such as 8/255")

    @classmethod
    def _of_text(cls, text: str) -> float:
        if len(text) > cls.MAX_LENGTH or cls.EXPONENT.search(text):
            raise ValueError(text)
        return float(Fraction(text))


class ByKind:
    """Marks a union of settings that is discriminated by `kind`."""


class Named:
    """Marks a name that becomes part of folders and metrics."""

    PATTERN = r"^[a-z0-9][a-z0-9_-]*$"


class Later:
    """Marks a key that is younger than stored results: at its default it is not part of the values.

    Fingerprints of results without the key stay as they were.
    """


class Hint(NamedTuple):
    """The remedy for a value out of range, if the bounds alone do not explain it."""

    remedy: str


MAX_SIDE = 4096  # pixels: four times this side, and no accelerator holds the activations
Count = Annotated[int, Ge(1)]
Side = Annotated[int, Ge(1), Le(MAX_SIDE), Hint(f"is outside 1 to {MAX_SIDE} pixels")]
NonNegative = Annotated[float, Ge(0)]
FLOAT32: Final = "float32"  # precision of whatever does not name another
EAGER: Final = False  # `compiled` of whatever does not say so
Precision = Literal["auto", "float32", "tf32", "bfloat16"]  # of passes, see `core/precision.py`
Positive = Annotated[float, Gt(0)]
Share = Annotated[float, Ge(0), Le(1)]
Budget = Annotated[float, Gt(0), Fractional()]  # l-inf: at most 1; an l2 norm may be larger
_SCALE = Hint("is outside [0, 1]; pixels are fractions of full scale, write e.g. 8/255")
Pixels = Annotated[float, Ge(0), Le(1), _SCALE, Fractional()]
_POSITIVE_SCALE = Hint("is outside (0, 1]; pixels are fractions of full scale, write e.g. 8/255")
PositivePixels = Annotated[float, Gt(0), Le(1), _POSITIVE_SCALE, Fractional()]
Name = Annotated[str, Named()]

BOUNDS: dict[type, tuple[Any, str, str]] = {
    Ge: (operator.ge, "ge", "at least"),
    Gt: (operator.gt, "gt", "above"),
    Le: (operator.le, "le", "at most"),
    Lt: (operator.lt, "lt", "below"),
}

WORDS: dict[type, str] = {
    int: "a whole number",
    float: "a number",
    str: "a string",
    bool: "true or false",
    tuple: "a list",
    dict: "a mapping",
}


@dataclass_transform(frozen_default=True, kw_only_default=True)
def settings(cls: type[T]) -> type[T]:
    """A frozen, slotted dataclass with keyword arguments only."""
    return dataclass(frozen=True, slots=True, kw_only=True)(cls)


class Settings:
    """Base of all settings classes: validates itself when constructed."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check(self)

    def problems(self) -> Iterator[Problem]:
        """Violated rules between fields; called only if every field is in range."""
        return iter(())

    def plain_fields(self) -> dict[str, Any]:
        """The fields as a recipe writes them; a `Later` one only if it is not at its default."""
        unset = unset_later_fields(self)
        names = [f.name for f in fields(self)]  # type: ignore[arg-type]
        return {name: getattr(self, name) for name in names if name not in unset}

    def lengths(self) -> Iterator[tuple[str, int]]:
        """(field, pixels) of every length that must fit into the images."""
        return iter(())


@cache
def hints_of(cls: type) -> dict[str, Any]:
    """The annotations of a class with their ranges and markers."""
    return get_type_hints(cls, include_extras=True)


@cache
def _later_fields(cls: type) -> frozenset[str]:
    hints = hints_of(cls)
    marked = (f.name for f in fields(cls) if any(type(m) is Later for m in get_args(hints[f.name])))
    return frozenset(marked)


def unset_later_fields(own: Any) -> frozenset[str]:
    """The `Later` fields that are at their defaults."""
    cls: Any = type(own)
    later = _later_fields(cls)
    return frozenset(name for name in later if getattr(own, name) == default_of(cls, name))


def check(own: Any) -> None:
    """Raise `SettingError` for values of the wrong type or out of range, else for violated rules.

    Integers in float fields become floats and lists in tuple fields become tuples, so headers and
    fingerprints have one form.
    """
    found: list[Problem] = []
    cls: type = type(own)
    hints = hints_of(cls)
    for field in fields(own):
        hint = hints[field.name]
        value = getattr(own, field.name)
        usual = _usual_form(value, hint)
        if usual is not value:
            object.__setattr__(own, field.name, usual)
        found += [Problem(field.name, value, why) for why in refusals(usual, hint)]
    if found := found or list(own.problems()):
        raise SettingError(*found)


def _usual_form(value: Any, hint: Any) -> Any:
    """The value converted to the type of the hint: list to tuple, int to float."""
    if type(value) is list and any(refusals(value, hint)):
        return value if any(refusals(tuple(value), hint)) else tuple(value)
    if type(value) is int and any(refusals(value, hint, exact=True)):
        return value if any(refusals(float(value), hint)) else float(value)
    return value


def refusals(value: Any, hint: Any, *, exact: bool = False) -> Iterator[str]:
    """Why a value does not fit a type hint with ranges; `exact`: integers are not floats."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        yield from _out_of_range(value, args, exact=exact)
    elif origin in (Union, UnionType):
        tries = [list(refusals(value, arg, exact=exact)) for arg in args]
        yield from () if not all(tries) else tries[0]
    elif origin is Literal:
        if value not in args:
            yield f"is unknown; choose one of {', '.join(map(str, args))}"
    elif origin is tuple and isinstance(value, tuple):
        yield from _wrong_entries(value, args, exact=exact)
    elif hint is not Any and isinstance(kind := origin or hint, type):
        fits = isinstance(value, kind) or (kind is float and type(value) is int and not exact)
        if not fits or (type(value) is bool and kind is not bool):
            yield f"is not {WORDS.get(kind, kind.__name__)}"


def _out_of_range(value: Any, args: tuple[Any, ...], *, exact: bool) -> Iterator[str]:
    wrong = list(refusals(value, args[0], exact=exact))
    hint = next((mark.remedy for mark in args[1:] if isinstance(mark, Hint)), None)
    for mark in [] if wrong or value is None else args[1:]:
        fits, name, word = BOUNDS.get(type(mark), (None, "", ""))
        if fits and not fits(value, limit := getattr(mark, name)):
            wrong.append(hint or f"must be {word} {limit:g}")
        elif isinstance(mark, MinLen) and len(value) < mark.min_length:
            wrong.append(f"needs {mark.min_length} entries or more")
    yield from wrong[:1]


def _wrong_entries(value: tuple[Any, ...], args: tuple[Any, ...], *, exact: bool) -> Iterator[str]:
    if args[1:] != (...,) and len(value) != len(args):
        yield f"needs {len(args)} entries"
        return
    hints = args[:1] * len(value) if args[1:] == (...,) else args
    for inner, hint in zip(value, hints, strict=True):
        yield from refusals(inner, hint, exact=exact)


def plain(value: Any, *, exclude: Collection[str] = ()) -> Any:
    """Settings as plain JSON values, all defaults included.

    `exclude` applies to the fields of these settings, not to nested ones.
    """
    if is_dataclass(value) and not isinstance(value, Settings):  # settings of user code
        value = {f.name: getattr(value, f.name) for f in fields(value)}
    if isinstance(value, Settings):
        own = value.plain_fields()
        return {name: plain(inner) for name, inner in own.items() if name not in exclude}
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def default_of(cls: type, name: str) -> Any:
    """The default of a field; `MISSING` if it has none."""
    field = next(f for f in fields(cls) if f.name == name)
    return field.default if field.default_factory is MISSING else field.default_factory()


def changed_fields(own: Any) -> set[str]:
    """Names of the fields that differ from their defaults."""
    return {f.name for f in fields(own) if getattr(own, f.name) != default_of(type(own), f.name)}


def values_of(own: Any) -> dict[str, Any]:
    """Fields by name with unconverted values, for a constructor with the same parameters."""
    return {field.name: getattr(own, field.name) for field in fields(own)}
