"""Errors of a recipe in terms of its keys: pydantic's errors have neither file names nor hints.

A pydantic error has a location (keys, list positions and union tags). It is followed here through
the type hints of the schema and the values of the file together, so that tags are distinguished
from keys and every place has its valid keys and kinds.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from components.core import user_code
from components.core.hints import did_you_mean
from components.core.registry import KIND
from components.core.settings import WORDS, Hint, Problem, SettingError, hints_of

UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden")
WRONG_KIND = (
    *("union_tag_not_found", "union_tag_invalid"),
    *("model_attributes_type", "dataclass_type", "model_type"),
)
TYPES = {
    **{"int": int, "float": float, "string": str, "bool": bool},
    **{"list": tuple, "tuple": tuple, "dict": dict},
}
MOST_SHOWN = 200  # characters of a value in a message
RANGES = {
    "greater_than": "above",
    "greater_than_equal": "at least",
    "less_than": "below",
    "less_than_equal": "at most",
}


def explain(model: type[BaseModel], values: Any, error: ValidationError) -> list[Problem]:
    """All mistakes that `model` found in plain values."""
    errors = list(_once_for_words(error.errors(include_url=False)))
    places = [found["loc"] for found in errors]
    return [
        problem
        for found in errors
        if not (found["type"] == "too_short" and _has_entry(places, found["loc"]))
        for problem in _problems(Place(model, values), found)
    ]


def _once_for_words(errors: Sequence[Any]) -> Iterator[Any]:
    """The errors, one for a value that is neither a number nor one of some words.

    pydantic tells one for each and adds its own name of the type to the location.
    """
    words = {e["loc"][:-1]: e["ctx"]["expected"] for e in errors if _names_words(e["loc"])}
    for found in errors:
        above = found["loc"][:-1]
        if not _names_words(found["loc"]):
            yield {**found, "loc": above, "words": words[above]} if above in words else found


def _names_words(place: tuple[Any, ...]) -> bool:
    return bool(place) and str(place[-1]).startswith("literal[")


def _has_entry(places: Sequence[tuple[Any, ...]], above: tuple[Any, ...]) -> bool:
    """Whether an entry of the list at `above` is wrong: pydantic does not count it."""
    return any(len(p) > len(above) and p[: len(above)] == above for p in places)


def truth_values(model: type[BaseModel], values: Any) -> Iterator[Problem]:
    """`true` and `false` in place of numbers, which pydantic would read as 1 and 0."""
    for path in _paths_of_truth_values(values):
        place = Place(model, values)
        for part in path:
            kind = place.value.get(KIND) if isinstance(place.value, Mapping) else None
            place = (place.of_kind(kind) if isinstance(kind, str) else place).below(part)
        members = place.members()
        if bool not in members and (number := {int, float}.intersection(members)):
            remedy = f"is not {WORDS[int if int in number else float]}"
            yield Problem(".".join(map(str, path)), str(place.value).lower(), remedy)


def _paths_of_truth_values(values: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(values, bool):
        yield path
    elif isinstance(values, Mapping):
        for key, inner in values.items():
            yield from _paths_of_truth_values(inner, (*path, key))
    elif isinstance(values, list | tuple):
        for number, inner in enumerate(values):
            yield from _paths_of_truth_values(inner, (*path, number))


def _problems(place: "Place", error: Any) -> Iterator[Problem]:
    path: list[str] = []
    above = place
    for part in error["loc"]:
        if place.is_tag(part):
            place = place.of_kind(part)
        elif part != "[key]":  # pydantic's word for "the key itself"
            above, place = place, place.below(part)
            path.append(str(part))
    key, cause = ".".join(path), error.get("ctx", {}).get("error")
    if isinstance(cause, SettingError):  # raised by the settings, which name the field
        for p in cause.problems:
            yield Problem(".".join(filter(None, [key, p.field])), p.value, p.remedy)
    elif error["type"] in UNKNOWN:
        remedy = above.former_keys().get(path[-1]) or did_you_mean(path[-1], above.keys())
        yield Problem(key, _shown(error["input"]), remedy)
    elif error["type"] == "invalid_key":  # YAML reads `on:` as True
        named = ".".join([*path[:-1], str(error["input"])])
        yield Problem(named, "", f"is not a word; put the key in quotes. {_allowed(above)}")
    elif error["type"] == "missing":
        yield Problem(key, "", "is missing; write it")
    elif error["type"] in WRONG_KIND:
        yield _wrong_section(place, key, error["input"])
    else:
        remedy = _in_words(place, error, cause)
        missing = place.value is None and remedy.startswith("is missing")
        yield Problem(key, "" if missing else _shown(place.value), remedy)


def _shown(value: Any) -> str:
    """A value of the file, cut to fit one line."""
    text = repr(value[:MOST_SHOWN] if isinstance(value, list | str) else value)
    longer = len(text) > MOST_SHOWN or (isinstance(value, list | str) and len(value) > MOST_SHOWN)
    return f"{text[:MOST_SHOWN]}..." if longer else text


def _allowed(place: "Place") -> str:
    return f"Allowed: {', '.join(sorted(place.keys()))}"


def _wrong_section(place: "Place", key: str, given: Any) -> Problem:
    """Problem of a section that is not a mapping, has no kind or an unknown one."""
    kinds = place.kinds()
    if not isinstance(given, Mapping):
        first = given if isinstance(given, str) and given in kinds else next(iter(kinds), "")
        example = f"{{{KIND}: {first}}}" if kinds else "{" + next(iter(place.keys()), "") + ": ...}"
        return Problem(key, _shown(given), f"is not a section; write e.g. {example}")
    if KIND not in given:
        return Problem(f"{key}.{KIND}", "", f"is missing; choose one of {', '.join(kinds)}")
    return Problem(f"{key}.{KIND}", _shown(given[KIND]), did_you_mean(str(given[KIND]), kinds))


def _in_words(place: "Place", error: Any, cause: Exception | None) -> str:
    """The message of pydantic, or the hint of the settings for values out of range."""
    text = str(cause) if cause else _translated(error)
    text = (error["type"] in RANGES and place.remedy()) or text
    text += f" or {error['words']}" if "words" in error else ""
    starts = ("is ", "names ", "lists ", "must ", "needs ")
    return text if text.startswith(starts) else f"is wrong: {text}"


def _translated(error: Any) -> str:
    """The message of pydantic, or the words of the settings for the same mistake."""
    kind, known = error["type"], error.get("ctx", {})
    if kind in RANGES:
        limit = known[next(iter(known))]
        return f"must be {RANGES[kind]} {limit:g}"
    word, _, why = kind.partition("_")
    if word in TYPES and why in ("type", "parsing", "from_float"):
        return f"is not {WORDS[TYPES[word]]}"
    if kind == "too_short":
        return f"needs {known['min_length']} or more entries"
    if kind == "string_pattern_mismatch":
        return (
            "is not a name: write small letters, digits, - and _, and begin with a letter or digit"
        )
    if kind == "literal_error":
        return f"is unknown; choose one of {known['expected'].replace(' or ', ', ')}"
    text: str = error["msg"]
    return text[0].lower() + text[1:]


class Place(NamedTuple):
    """A type hint of the schema and the value at this place."""

    hint: Any
    value: Any

    def remedy(self) -> str | None:
        """The hint of the settings for values out of range."""
        hints = (self.hint, *get_args(self.hint))
        marks = [mark for hint in hints for mark in getattr(hint, "__metadata__", ())]
        return next((mark.remedy for mark in marks if isinstance(mark, Hint)), None)

    def bare(self) -> Any:
        """The hint without its annotations."""
        hint = self.hint
        while get_origin(hint) is Annotated:
            hint = get_args(hint)[0]
        return hint

    def members(self) -> list[Any]:
        """The types that this place may hold."""
        if own := _users_class(self.value):
            return [own]
        bare = self.bare()
        if get_origin(bare) in (Union, UnionType):
            return [m for arg in get_args(bare) for m in Place(arg, None).members()]
        return [bare]

    def kinds(self) -> dict[str, Any]:
        """The classes that this place may hold, by their `kind`."""
        found = {}
        for member in self.members():
            hint = _hints(member).get(KIND)
            for name in get_args(hint):
                found[name] = member
        return found

    def is_tag(self, part: Any) -> bool:
        """Whether a part of a location is the tag of a union, not a key."""
        several = len([m for m in self.members() if m is not NoneType]) > 1
        if several and part == "list":  # a tune axis that is a list of values
            return True
        return several and part in self.kinds()

    def of_kind(self, part: str) -> "Place":
        """The same place as one of its kinds."""
        return self._replace(hint=self.kinds().get(part, self.hint))

    def keys(self) -> list[str]:
        """The valid keys of this place."""
        return [k for m in self.members() for k in (*_hints(m), *getattr(m, "further_keys", ()))]

    def former_keys(self) -> dict[str, str]:
        """Keys of earlier versions, each with what to write instead."""
        return {k: v for m in self.members() for k, v in getattr(m, "former_keys", {}).items()}

    def below(self, part: Any) -> "Place":
        """The place that a key or a list position leads to."""
        value = self.value[part] if _holds(self.value, part) else None
        for member in self.members():
            origin, args = get_origin(member), get_args(member)
            if origin in (list, tuple, set) and args:
                return Place(args[0], value)
            if origin in (dict, Mapping) and args:
                return Place(args[1], value)
            if part in _hints(member):
                return Place(_hints(member)[part], value)
        return Place(Any, value)


def _users_class(value: Any) -> type | None:
    """The settings class of an entry whose kind is user code."""
    kind = value.get(KIND) if isinstance(value, Mapping) else None
    if not user_code.is_reference(kind) or not user_code.is_trusted():
        return None
    try:
        return user_code.settings_class(str(kind), field=KIND)
    except SettingError:  # the error that is being explained
        return None


def _hints(cls: Any) -> dict[str, Any]:
    """The type hints of a section's or settings class's fields."""
    if not isinstance(cls, type):
        return {}
    if issubclass(cls, BaseModel):
        hints = hints_of(cls)
        return {name: hints[name] for name in cls.model_fields}
    if is_dataclass(cls):
        hints = hints_of(cls)
        return {f.name: hints[f.name] for f in fields(cls)}
    return {}


def _holds(values: Any, part: Any) -> bool:
    if isinstance(values, list):
        return isinstance(part, int) and part < len(values)
    return isinstance(values, Mapping) and part in values
