"""Renders content as one self-contained HTML file: no requests, deterministic.

The only scripts are files of this folder: a page's policy names their digests, so that no other can
run. Pages are whole without them.
"""

import base64
import hashlib
import re
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from components.core.control_characters import visible
from components.report.content import (
    RESULT_KINDS,
    Accuracy,
    Cell,
    Column,
    Content,
    Flag,
    Link,
    Missing,
    Table,
)
from components.report.palette import COLOURS
from components.report.tables import to_csv

TEMPLATES = Path(__file__).parent
SCRIPTS = ("page.js", "sorting.js")
MANY_COLUMNS = 4  # above it a table is shown as one card per row on a phone
CROWDED_COLUMNS = 8  # above it a table has smaller type


def render(content: Content) -> str:
    """The page as HTML; all values are escaped except our own charts."""
    return rendered("page.html.j2", content)


def rendered(template: str, content: Content, **further: object) -> str:
    """A page from a template of this folder; one that extends the report's takes further values."""
    scripts = {name: (TEMPLATES / name).read_text(encoding="utf-8") for name in SCRIPTS}
    page = _environment().get_template(template)
    text = page.render(
        page=content,
        failed=[check for check in content.checks if not check.holds],
        passed=[check for check in content.checks if check.holds],
        colours=COLOURS,
        scripts={name: Markup(script) for name, script in scripts.items()},
        script_digests=[_digest(f"\n{script}") for script in scripts.values()],
        **further,
    )
    # Names that others chose must not reorder the text around them, also inside charts.
    return visible(text)


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
    environment.filters |= {"table_class": table_class, "breakable": breakable}
    environment.tests["accuracy_column"] = lambda column: column.kind in RESULT_KINDS
    environment.tests["link"] = lambda value: isinstance(value, Link)
    environment.tests["accuracy"] = lambda value: isinstance(value, Accuracy)
    environment.tests["flag"] = lambda value: isinstance(value, Flag)
    return environment


def _digest(text: str) -> str:
    """As Content-Security-Policy names a script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def table_class(table: Table) -> str:
    """How a table adapts to its number of columns."""
    count = len(table.columns)
    names = {"sortable": table.sortable, "cards": count > MANY_COLUMNS}
    names["crowded"] = count > CROWDED_COLUMNS
    return " ".join(name for name, has in names.items() if has)


def breakable(text: str) -> Markup:
    """A heading that may break after the dots and underscores of a setting's name."""
    return Markup(re.sub(r"([._])(?=\w)", r"\1<wbr>", str(escape(text))))


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
