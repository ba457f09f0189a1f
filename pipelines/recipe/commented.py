"""YAML with a comment for every key."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import yaml

from components.core.control_characters import one_line

COLUMN = 36  # where comments begin, if the value leaves room
WIDTH = 118  # longer lines have their comment above
INDENT = "  "


class Said(NamedTuple):
    """A value, or a section of such values, and what is said about it."""

    value: Any
    comment: str = ""


Keys = Mapping[str, Said]


def commented_yaml(keys: Keys, *, head: list[str]) -> str:
    """The text of a YAML file: lines of a head, then the keys in their order."""
    lines = [f"# {one_line(line)}".rstrip() for line in head]
    return "\n".join([*lines, *_lines(keys, "")]) + "\n"


def plain(keys: Keys) -> dict[str, Any]:
    """The values without comments."""
    return {
        key: plain(said.value) if _is_section(said.value) else said.value
        for key, said in keys.items()
    }


def _lines(keys: Keys, indent: str) -> Iterator[str]:
    for key, said in keys.items():
        nested = _is_section(said.value)
        text = f"{indent}{_flow(key)}:" + ("" if nested else f" {_flow(said.value)}")
        yield from _with_comment(text, one_line(said.comment), indent)
        if nested:
            yield from _lines(said.value, indent + INDENT)


def _is_section(value: Any) -> bool:
    """Whether the value is a section of keys with comments, not a plain mapping."""
    return (
        isinstance(value, dict)
        and bool(value)
        and all(isinstance(inner, Said) for inner in value.values())
    )


def _with_comment(text: str, comment: str, indent: str) -> Iterator[str]:
    if not comment:
        yield text
    elif len(line := f"{text:<{COLUMN}}  # {comment}") <= WIDTH:
        yield line
    else:
        yield f"{indent}# {comment}"
        yield text


def _flow(value: Any) -> str:
    """A value on one line; long texts are not folded."""
    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), sort_keys=False)
    return text.removesuffix("...\n").strip()
