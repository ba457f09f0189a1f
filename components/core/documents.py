"""JSON that others may have written: whatever cannot be used is a `ValueError`."""

import json
from typing import Any

MAX_DEPTH = 100  # values inside values; our own documents need ten


def parse_json(text: str | bytes) -> Any:
    """The value of a document; one that is nested too deeply for later steps is refused."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return value
    raise _too_deep()


def _inside(value: object) -> Any:
    """The containers directly inside a value."""
    found = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (inner for inner in found if isinstance(inner, dict | list))


def _too_deep() -> ValueError:
    return ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
