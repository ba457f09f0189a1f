"""The headline table of a report with the figures of evaluation suites."""

from components.report.content import Cell, Column, Table
from components.report.evaluation.chapters import Evaluation

CLEAN = Column("Clean", "measured")


def with_evaluation(headline: Table, found: Evaluation) -> Table:
    """The table with a column per suite and a row per evaluated model; unchanged without any.

    Clean accuracy that another stage has measured stays.
    """
    added = found.headline_columns()
    if not added:
        return headline
    cells: dict[str, dict[Column, Cell]] = {
        str(row[0]): dict(zip(headline.columns[1:], row[1:], strict=True)) for row in headline.rows
    }
    for column, shares in added.items():
        for model, share in shares.items():
            line = cells.setdefault(model, {})
            if line.get(column) is None:
                line[column] = share
    columns = list(dict.fromkeys([CLEAN, *headline.columns[1:], *added]))
    rows = [(model, *(line.get(c) for c in columns)) for model, line in cells.items()]
    return Table(headline.name, (headline.columns[0], *columns), tuple(rows))
