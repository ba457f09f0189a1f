"""The JSON Schema of recipe files, for editors: completion, hover texts, misspelt keys.

It describes files as they are written, not resolved recipes: a recipe that extends another has only
what differs, and `key: null` removes what it inherits. So no key is required within a section, and
every key may be null. What only the values together tell is left to `casemate lint`.
"""

from typing import Any

from pipelines.recipe.schema.meanings import described_schema
from pipelines.recipe.schema.recipe import EXTENDS

DIALECT = "https://json-schema.org/draft/2020-12/schema"
NULL = {"type": "null"}
UNIONS = ("oneOf", "anyOf")
TEXTS: tuple[str, ...] = ("title", "description", "default")


def json_schema() -> dict[str, Any]:
    """The schema of a recipe's YAML file."""
    schema: dict[str, Any] = _written(described_schema())
    schema["properties"][EXTENDS] = {
        "description": "A recipe, by its name or path, whose values are used where this has none.",
        "type": "string",
    }
    return {
        "$schema": DIALECT,
        **schema,
        "title": "Casemate recipe",
        "required": ["name"],
        "anyOf": [{"required": ["data"]}, {"required": [EXTENDS]}],
    }


def _written(node: Any) -> Any:
    """A schema of complete values as one of written values."""
    if isinstance(node, list):
        return [_written(inner) for inner in node]
    if not isinstance(node, dict):
        return node
    kept = {key: value for key, value in node.items() if key not in ("required", "discriminator")}
    for key in ("properties", "patternProperties", "$defs"):
        if key in kept:
            kept[key] = {name: _written(inner) for name, inner in kept[key].items()}
    for key in ("properties", "patternProperties"):
        if key in kept:
            kept[key] = {name: _or_null(inner) for name, inner in kept[key].items()}
    if "patternProperties" in kept:
        kept["additionalProperties"] = False  # other names are refused
    if "items" in kept:
        kept["items"] = _written(kept["items"])
    for key in UNIONS:
        if key in kept:  # without its kind, which may be inherited, a value may fit several
            kept["anyOf"] = _written(kept.pop(key))
    return kept


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with null as another value; texts and defaults stay where editors look."""
    texts = {key: schema[key] for key in TEXTS if key in schema}
    rest = {key: value for key, value in schema.items() if key not in texts}
    choices = rest["anyOf"] if rest.keys() == {"anyOf"} else [rest]
    return {**texts, "anyOf": choices if NULL in choices else [*choices, NULL]}
