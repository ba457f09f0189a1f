"""One chapter from the charts and tables of a suite."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from components.report.content import Chapter, Chart, Table
from components.report.evaluation.comparisons import comparison_table
from components.report.evaluation.rows import SuiteRows


@dataclass(frozen=True, slots=True)
class SuiteChapter:
    """What the chapter of a suite shows of each setting."""

    anchor: str
    title: str
    intro: str
    charts: Callable[[SuiteRows], Iterable[Chart]]
    tables: Callable[[SuiteRows], Iterable[Table]] = lambda suite: ()

    def of(self, parts: Sequence[SuiteRows]) -> Chapter:
        """All settings, each with its tables and comparisons."""
        tables = [t for part in parts for t in (*self.tables(part), comparison_table(part)) if t]
        return Chapter(
            self.anchor,
            self.title,
            self.intro,
            charts=tuple(chart for part in parts for chart in self.charts(part)),
            tables=tuple(tables),
        )
