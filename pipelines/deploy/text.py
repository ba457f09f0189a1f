"""YAML for people: stable order, text blocks, comments.

A comment is a key that starts with `# ` and has no value; `without_notes` removes them.
"""

import re
from collections.abc import Sequence
from typing import Any

import yaml

Document = dict[str, Any]
_NOTE = re.compile(r"^( *(?:- )?)(['\"]?)# (.*)\2: null$", re.MULTILINE)


class _Dumper(yaml.SafeDumper):
    """Indented lists, text with several lines as blocks, no aliases."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def note(text: str) -> Document:
    """A comment, to be merged into a mapping before the key that it belongs to."""
    return {f"# {text}": None}


def without_notes(value: Any) -> Any:
    """Plain values without comments."""
    if isinstance(value, dict):
        return {k: without_notes(v) for k, v in value.items() if not str(k).startswith("# ")}
    return [without_notes(entry) for entry in value] if isinstance(value, list) else value


def to_text(documents: Sequence[Document], *, header: Sequence[str] = ()) -> str:
    """The documents as YAML, below lines of comments."""
    top = "".join(f"# {line}".rstrip() + "\n" for line in header)
    return top + "---\n".join(map(_document, documents))


def _document(values: Document) -> str:
    text = yaml.dump(values, Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True)
    return _NOTE.sub(lambda found: f"{found[1]}# " + found[3].replace("''", "'"), text)
