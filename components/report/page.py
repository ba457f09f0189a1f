"""Renders content as one self-contained HTML file: no requests, deterministic.

Pages have no scripts; that of the leaderboard is whole without its own, too.
"""

import base64
from pathlib import Path

import jinja2
from markupsafe import Markup

from components.core.control_characters import visible
from components.report.content import (
    RESULT_KINDS,
    Accuracy,
    Cell,
    Column,
    Content,
    Flag,
    Missing,
    Table,
)
from components.report.palette import COLOURS
from components.report.tables import to_csv

TEMPLATES = Path(__file__).parent


def render(content: Content) -> str:
    """The page as HTML; all values are escaped except our own charts."""
    return rendered("page.html.j2", content)


def rendered(template: str, content: Content, **further: object) -> str:
    """A page from a template of this folder; one that extends the report's takes further values."""
    failed = [check for check in content.checks if not check.holds]
    page = _environment().get_template(template)
    # Names that others chose must not reorder the text around them, also inside charts.
    return visible(page.render(page=content, failed=failed, colours=COLOURS, **further))


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES, encoding="utf-8"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"cell": cell_text, "csv_uri": csv_uri, "chart": Markup}
    environment.filters["sort_value"] = sort_value
    environment.tests["accuracy_column"] = lambda column: column.kind in RESULT_KINDS
    environment.tests["accuracy"] = lambda value: isinstance(value, Accuracy)
    environment.tests["flag"] = lambda value: isinstance(value, Flag)
    return environment


def cell_text(value: Cell, column: Column) -> str:
    """The text of a table cell; accuracies are rounded by the kind of their column."""
    if value is None:
        return "not run" if column.kind in RESULT_KINDS else "-"
    if isinstance(value, Missing):
        return "none"
    if isinstance(value, Accuracy):
        if column.kind not in ("measured", "attacked", "proven"):
            raise ValueError(
                f"column {column.title!r} of kind {column.kind} cannot hold an accuracy"
            )
        return value.percent(column.kind)
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def sort_value(value: Cell) -> str:
    """What a table is sorted by: a number in full, or text; empty values and alarms come last."""
    if value is None or isinstance(value, Missing) or (isinstance(value, Flag) and value.is_alarm):
        return ""
    if isinstance(value, Accuracy):
        return repr(value.value)
    return repr(value) if isinstance(value, float) else str(value)


def csv_uri(table: Table) -> str:
    """The table as a data URI, a download inside the page."""
    return "data:text/csv;charset=utf-8;base64," + base64.b64encode(to_csv(table).encode()).decode()
