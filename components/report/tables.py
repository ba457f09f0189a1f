"""Tables as CSV text in full precision; the page shows rounded values."""

import csv
import io

from components.core.control_characters import visible
from components.report.content import RESULT_KINDS, Accuracy, Cell, Column, Missing, Table

FORMULA = ("=", "+", "-", "@", "\t")
_PARTS = ("value", "low", "high", "num_items")


def _header(column: Column) -> list[str]:
    name = _text(f"{column.title} ({column.detail})" if column.detail else column.title)
    return [f"{name} {part}" for part in _PARTS] if column.kind in RESULT_KINDS else [name]


def _plain(value: Cell) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return repr(value)  # the shortest exact decimal
    return _text(str(value)) if isinstance(value, str) else str(value)


def _text(text: str) -> str:
    """A cell that spreadsheets do not compute: they take `=`, `+`, `-` and `@` for formulas."""
    shown = visible(text)
    is_formula = shown.startswith(FORMULA) and len(shown) > 1 and not _is_number(shown)
    return f"'{shown}" if is_formula else shown


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _fields(column: Column, value: Cell) -> list[str]:
    if column.kind not in RESULT_KINDS:
        return [_plain(value)]
    if value is None or isinstance(value, Missing):
        return [""] * len(_PARTS)
    if not isinstance(value, Accuracy):
        raise ValueError(f"column {column.title!r} holds accuracies, got {value!r}")  # noqa: TRY004
    return [_plain(getattr(value, part)) for part in _PARTS]


def to_csv(table: Table) -> str:
    """RFC 4180 text; an accuracy becomes four columns, a missing one four empty fields."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\r\n")
    writer.writerow([name for column in table.columns for name in _header(column)])
    for row in table.rows:
        pairs = zip(table.columns, row, strict=True)
        writer.writerow([field for column, value in pairs for field in _fields(column, value)])
    return buffer.getvalue()
