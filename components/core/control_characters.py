"""Control characters in names that others chose: shown as `\\x1b` and the like, never obeyed.

A file name or a class name may hold sequences that clear a terminal, or marks that reorder text.
"""

import re

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LINE_BREAK = re.compile(r"[ \t]*(?:\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029])\s*")
# C0 and C1 controls, marks and overrides of the writing direction, halves of characters.
_ODD = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


def visible(text: str) -> str:
    """Text with escapes in place of control characters; colours are dropped, lines stay."""
    return _ODD.sub(_escape, _COLOUR.sub("", text.replace("\r\n", "\n")))


def one_line(text: str) -> str:
    """Visible text without line breaks."""
    return visible(_LINE_BREAK.sub(" ", text.strip()))


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
