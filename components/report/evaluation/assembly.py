"""One chapter from the charts and tables of a suite."""

from collections.abc import Callable, Iterable, Sequence

from components.report.content import Chapter, Chart, Table
from components.report.evaluation.comparisons import comparison_table
from components.report.evaluation.rows import SuiteRows


def suite_chapter(
    anchor: str,
    title: str,
    intro: str,
    parts: Sequence[SuiteRows],
    *,
    charts: Callable[[SuiteRows], Iterable[Chart]],
    tables: Callable[[SuiteRows], Iterable[Table]] = lambda suite: (),
) -> Chapter | None:
    """All settings of a suite, each with its tables and comparisons; None without rows."""
    if not parts:
        return None
    shown = [table for part in parts for table in (*tables(part), comparison_table(part)) if table]
    return Chapter(
        anchor,
        title,
        intro,
        charts=tuple(chart for part in parts for chart in charts(part)),
        tables=tuple(shown),
    )
