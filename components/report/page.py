"""Content to one self-contained HTML file: no script, no request; equal content, equal bytes."""

import base64
from pathlib import Path

import jinja2
from markupsafe import Markup

from components.report.content import STANDINGS, Accuracy, Cell, Column, Content, Table
from components.report.palette import COLOURS
from components.report.tables import to_csv

TEMPLATE = Path(__file__).with_name("page.html.j2")


def render(content: Content) -> str:
    """The page as text; every value is escaped, only our own charts enter as markup."""
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"cell": cell_text, "csv_uri": csv_uri, "chart": Markup}
    environment.tests["standing"] = lambda column: column.kind in STANDINGS
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    failed = [check for check in content.checks if not check.holds]
    return template.render(page=content, failed=failed, colours=COLOURS)


def cell_text(value: Cell, column: Column) -> str:
    """A table cell in words; the three standings have a rounding of their own."""
    if value is None:
        return "not run" if column.kind in STANDINGS else "-"
    if isinstance(value, Accuracy):
        if column.kind not in ("measured", "attacked", "proven"):
            raise ValueError(
                f"column {column.title!r} of kind {column.kind} cannot hold an accuracy"
            )
        return value.percent(column.kind)
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def csv_uri(table: Table) -> str:
    """The table as a download that needs no second file."""
    return "data:text/csv;charset=utf-8;base64," + base64.b64encode(to_csv(table).encode()).decode()
