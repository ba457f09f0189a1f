"""The reference of recipes, from their schema: every section, key, range, default and meaning."""

import json
from collections.abc import Iterator
from typing import Any

from pipelines.recipe.schema.meanings import described_schema

Schema = dict[str, Any]
INTRODUCTION = """\
# Recipe reference

Every key of a recipe with its values, its default and its meaning, as the settings classes state
them. `name` and `data` are required. `NAME` stands for names that you choose. `casemate recipes
NAME` prints a recipe with all values written out, `casemate recipes --schema` the JSON Schema.
"""
WORDS = {"integer": "whole number", "string": "text", "boolean": "true or false"}
BOUNDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
    "minItems": "{} or more",
    "minLength": "{} characters or more",
}


def recipe_page() -> str:
    """The page as Markdown."""
    return Reference(described_schema()).page()


class Reference:
    """Sections in the order of the schema; each settings class once, where it is first used."""

    def __init__(self, schema: Schema) -> None:
        self.classes: dict[str, Schema] = schema["$defs"]
        self.top = schema
        self.anchors: dict[str, str] = {}  # class -> anchor
        self.waiting: list[tuple[str, str]] = []  # (class, its place), not yet shown

    def page(self) -> str:
        blocks = [INTRODUCTION, self._table("", self.top)]
        self.waiting.clear()  # a section's class has its own chapter below
        self.anchors.clear()
        for key, schema in self.top["properties"].items():
            if next(self._references(schema), None):
                blocks.append(f"## {key}\n")
                self._cell(f"{key}.NAME" if "patternProperties" in schema else key, schema)
                blocks += self._chapters()
        return "\n".join(blocks).rstrip("\n") + "\n"

    def _chapters(self) -> Iterator[str]:
        """A chapter for each class that waits, and for those that it brings up."""
        while self.waiting:
            name, place = self.waiting.pop(0)
            schema = self.classes[name]
            kinds = self._kinds(schema)
            listed = " or ".join(f"`{kind}`" for kind in kinds)
            title = f"### `{place}`" + (f", kind {listed}" if kinds else "") + "\n"
            yield f'<a id="{self.anchors[name]}"></a>\n'
            if place not in self.top["properties"]:  # its chapter has this title
                yield title
            if text := schema.get("description", ""):
                yield " ".join(text.split()) + "\n"
            yield self._table(place, schema)

    def _table(self, place: str, schema: Schema) -> str:
        """One row per key."""
        rows = ["| key | value | default | meaning |", "|---|---|---|---|"]
        required = schema.get("required", [])
        for key, value in schema.get("properties", {}).items():
            inner = f"{place}.{key}" if place else key
            given = "required" if key in required else self._default(value)
            meaning = " ".join(value.get("description", "").split()).replace("None:", "null:")
            rows.append(f"| `{key}` | {self._cell(inner, value)} | {given} | {_escaped(meaning)} |")
        return "\n".join(rows) + "\n" if len(rows) > 2 else "No keys.\n"

    def _default(self, schema: Schema) -> str:
        """A short default as code; a nested section's defaults are in its own table."""
        if "default" not in schema:
            return ""
        value = schema["default"]
        if isinstance(value, dict) and value:
            kind = value.get("kind")
            return f"kind `{kind}`" if kind else "its defaults"
        return f"`{_escaped(json.dumps(value))}`"

    def _cell(self, place: str, schema: Schema) -> str:
        """The values that a key takes, with links to the classes."""
        if "$ref" in schema:
            return self._link(place, schema["$ref"])
        for union in ("anyOf", "oneOf"):
            if union in schema:
                found = [self._cell(place, choice) for choice in schema[union]]
                return " or ".join(dict.fromkeys(text for text in found if text))
        if "enum" in schema:
            return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
        if "const" in schema:
            return f"`{json.dumps(schema['const'])}`"
        if "patternProperties" in schema:
            (inner,) = schema["patternProperties"].values()
            name = place if place.endswith(".NAME") else f"{place}.NAME"
            return f"NAME: {self._cell(name, inner)}"
        return self._plain(place, schema)

    def _plain(self, place: str, schema: Schema) -> str:
        """A type with its bounds; lists and maps with what they hold."""
        kind = schema.get("type", "any value")
        text = WORDS.get(kind, kind)
        if kind == "array":
            inner = schema.get("items") or next(iter(schema.get("prefixItems", [])), {})
            text = f"list of {self._cell(f'{place}[]', inner)}"
        elif kind == "object" and isinstance(schema.get("additionalProperties"), dict):
            text = f"map to {self._cell(f'{place}.NAME', schema['additionalProperties'])}"
        elif kind == "object":
            text = "map"
        bounds = [words.format(schema[key]) for key, words in BOUNDS.items() if key in schema]
        return ", ".join([text, *bounds])

    def _link(self, place: str, reference: str) -> str:
        """A link to the chapter of a class, which is queued when it is first met."""
        name = reference.rpartition("/")[2]
        if name not in self.anchors:
            self.anchors[name] = name.lower()
            self.waiting.append((name, place))
        kinds = self._kinds(self.classes[name])
        return f"[{', '.join(kinds) or place.rpartition('.')[2]}](#{self.anchors[name]})"

    def _kinds(self, schema: Schema) -> list[str]:
        """The values of `kind`, if the class has it."""
        kind = schema.get("properties", {}).get("kind", {})
        values = [kind["const"]] if "const" in kind else kind.get("enum", [])
        return [str(value) for value in values]

    def _references(self, node: Any) -> Iterator[str]:
        """Classes that a schema mentions."""
        if isinstance(node, dict):
            if "$ref" in node:
                yield node["$ref"]
            for inner in node.values():
                yield from self._references(inner)
        elif isinstance(node, list):
            for inner in node:
                yield from self._references(inner)


def _escaped(text: str) -> str:
    """Text that does not end a table's cell."""
    return text.replace("|", "\\|")
