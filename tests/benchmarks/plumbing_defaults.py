"""Defaults that are written twice, for `tests.benchmarks.plumbing`.

A default is a literal in a class body (`name: type = 20`, also inside `Field(...)` or `field(...)`)
or in a signature. None and empty values do not count, False and 0 do. Places come in three kinds:

- `section`: a class that derives from `Section` or pydantic's `BaseModel`;
- `settings`: a class that is decorated `@settings` or derives from `Settings`;
- `plain`: all other classes and all functions.

A field of a section is a duplicate where a settings or plain place has a default of the same name
and value (1 is 1.0) and stands for the same thing: the two places share two or more names of fields
or parameters, `kind` not counted, inherited ones counted. A field of a settings class is compared
with plain places only, so that a pair of places is counted from one side. However many places
repeat a field, it counts once.

Three further rules find twins that this misses:

- a plain place in the folder of a settings class repeats a default of the same name and value, even
  if they share no other name: a room has one meaning for a name;
- two settings classes, neither derived from the other, write `MIN_TWINS` or more defaults of the
  same names and values. Fewer are chance: two attacks may both take 100 steps;
- a command (`pipelines.cli`) and a function of its name elsewhere write the same default; switches,
  0 and 1 do not count.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.benchmarks.plumbing_source import Function, Module, Names, last_name

Key = tuple[str, object]  # name and value of a default
MIN_TWINS = 3


@dataclass
class Place:
    """A class or a function with the names it takes and the defaults it writes itself."""

    title: str
    kind: str
    names: set[str]
    parents: frozenset[str] = frozenset()  # titles of all classes above
    defaults: dict[str, object] = field(default_factory=dict)


class Duplicate(NamedTuple):
    """A default and the other places that write it."""

    place: str
    name: str
    value: str
    others: tuple[str, ...]


def duplicated_defaults(modules: list[Module]) -> list[Duplicate]:
    """Defaults of sections and settings that stand somewhere else, too."""
    places = [*_class_places(modules), *_function_places(modules)]
    holders: dict[Key, list[Place]] = defaultdict(list)
    for place in places:
        for key in place.defaults.items():
            holders[_comparable(key)].append(place)
    found = []
    for place in places:
        for name, value in place.defaults.items():
            others = tuple(
                other.title
                for other in holders[_comparable((name, value))]
                if name != "kind" and _repeats(place, other, value)
            )
            if others:
                found.append(Duplicate(place.title, name, repr(value), others))
    return sorted(found)


def _repeats(place: Place, other: Place, value: object) -> bool:
    """Whether a default of the same name and value in the other place is a repetition."""
    match place.kind, other.kind:
        case ("section", "settings" | "plain") | ("settings", "plain"):
            alike = place.kind == "settings" and _folder(place) == _folder(other)
            return alike or _same_thing(place, other)
        case "settings", "settings":
            return place.title < other.title and _are_twins(place, other)
        case "plain", "plain":
            commands = [x.title.startswith("pipelines.cli.") for x in (place, other)]
            return commands == [False, True] and value not in (0, 1) and _same_name(place, other)
    return False


def _are_twins(one: Place, other: Place) -> bool:
    if one.title in other.parents or other.title in one.parents:
        return False
    mine, theirs = ({_comparable(key) for key in x.defaults.items()} for x in (one, other))
    return len({key for key in mine & theirs if key[0] != "kind"}) >= MIN_TWINS


def _folder(place: Place) -> str:
    return place.title.rsplit(".", 2)[0]


def _same_name(one: Place, other: Place) -> bool:
    mine, theirs = (place.title.rpartition(".")[2] for place in (one, other))
    return mine == theirs


def _same_thing(one: Place, other: Place) -> bool:
    return len((one.names & other.names) - {"kind", "self"}) >= 2


def _comparable(key: Key) -> Key:
    """Hashable; True is not 1, but 1 is 1.0."""
    name, value = key
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = float(value)
    return name, repr(value)


def _class_places(modules: list[Module]) -> Iterator[Place]:
    names = Names(modules)
    classes = {(m.name, node.name): node for m in modules for node in m.classes()}
    parents = {
        place: [names.origin_of(place[0], base) or ("", "") for base in node.bases]
        for place, node in classes.items()
    }

    def ancestors(place: tuple[str, str]) -> Iterator[tuple[str, str]]:
        for parent in parents.get(place, []):
            yield parent
            yield from ancestors(parent)

    for place, node in classes.items():
        known = {place, *ancestors(place)}
        taken = {name for p in known if p in classes for name, _ in _fields(classes[p])}
        defaults = dict(_literals(_fields(node)))
        decorators = {last_name(decorator) for decorator in node.decorator_list}
        kind = _kind({name for _, name in known}, decorators)
        above = frozenset(".".join(parent) for parent in ancestors(place))
        yield Place(f"{place[0]}.{place[1]}", kind, taken, above, defaults)


def _kind(known: set[str], decorators: set[str]) -> str:
    if known & {"Section", "BaseModel"}:
        return "section"
    return "settings" if "Settings" in known or "settings" in decorators else "plain"


def _function_places(modules: list[Module]) -> Iterator[Place]:
    for module in modules:
        for node in module.functions():
            taken = {arg.arg for arg in _parameters(node)}
            title = f"{module.name}.{node.name}()"
            yield Place(title, "plain", taken, defaults=dict(_literals(_signature(node))))


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr | None]]:
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and last_name(part.annotation) != "ClassVar":
            yield last_name(part.target), part.value


def _parameters(node: Function) -> list[ast.arg]:
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]


def _signature(node: Function) -> Iterator[tuple[str, ast.expr | None]]:
    arguments = node.args
    usual = [*arguments.posonlyargs, *arguments.args][::-1]
    for arg, value in zip(usual, arguments.defaults[::-1], strict=False):
        yield arg.arg, value
    for arg, own in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield arg.arg, own


def _literals(pairs: Iterator[tuple[str, ast.expr | None]]) -> Iterator[Key]:
    """The pairs whose value is written out and says something."""
    for name, node in pairs:
        if isinstance(node, ast.Call) and last_name(node) in ("Field", "field"):
            words = [word.value for word in node.keywords if word.arg == "default"]
            node = next(iter([*node.args[:1], *words]), None)
        try:
            value = ast.literal_eval(node) if node is not None else None
        except (TypeError, ValueError):  # a name or a call: written somewhere else
            continue
        if value not in (None, "", (), [], {}, ...):
            yield name, value
