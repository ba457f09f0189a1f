"""Schemas without room for unknown keys, and every way to misspell a key of a document."""

import copy
from collections.abc import Iterator, Set
from typing import Any

from jsonschema import Draft202012Validator

TEXT = {"type": "string", "minLength": 1}
TEXTS = {"type": "array", "items": TEXT, "minItems": 1}
FLAG = {"type": "boolean"}
COUNT = {"type": "integer", "minimum": 1}


def closed(properties: dict[str, Any], *, optional: str = "") -> dict[str, Any]:
    """A mapping with these keys and no others; all are required but the optional ones."""
    required = [name for name in properties if name not in optional.split()]
    return {
        "type": "object", "properties": properties,
        "required": required, "additionalProperties": False,
    }  # fmt: skip


def matches(document: Any, schema: dict[str, Any]) -> bool:
    return bool(Draft202012Validator(schema).is_valid(document))


def problems(document: Any, schema: dict[str, Any]) -> list[str]:
    found = Draft202012Validator(schema).iter_errors(document)
    return [f"{error.json_path}: {error.message}" for error in found]


def misspellings(document: Any, *, free: Set[str] = frozenset()) -> Iterator[tuple[str, Any]]:
    """The document with one key changed, for every key at any depth, and where that is.

    Keys of the mappings `free` are values.
    """
    for path in _keys(document):
        if path[-2:-1] and path[-2] in free:
            continue
        changed = copy.deepcopy(document)
        place = changed
        for word in path[:-1]:
            place = place[word]
        place[f"{path[-1]}x"] = place.pop(path[-1])
        yield ".".join(map(str, path)), changed


def _keys(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    pairs = enumerate(document) if isinstance(document, list) else ()
    if isinstance(document, dict):
        yield from ((*path, key) for key in document)
        pairs = document.items()
    for key, value in pairs:
        yield from _keys(value, (*path, key))
