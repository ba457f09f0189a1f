"""Differences between models on the same items, with exact McNemar p-values and marks."""

from collections.abc import Iterator

from components.evaluate.metrics import MetricRow
from components.report.content import Cell, Column, Table
from components.report.evaluation import rows as look
from components.report.evaluation.rows import Place, SuiteRows
from components.report.wording import pixels

DIFFERENCE, P_VALUE = "difference_to/", "mcnemar_p/"
SIGNIFICANCE = ((0.001, "***"), (0.01, "**"), (0.05, "*"))
MARKED = SIGNIFICANCE[-1][0]
MOST_OPEN = 12  # rows of a table that is not folded
COLUMNS = (
    *(Column("Item"), Column("Model"), Column("minus"), Column("points", "number")),
    *(Column("at least", "number", "95%"), Column("at most", "number", "95%")),
    *(Column("p", "number", "McNemar"), Column("mark"), Column("n", "number")),
    Column("Note", "note"),
)


def comparison_table(suite: SuiteRows) -> Table | None:
    """One row per pair of models and item; None without comparisons.

    P-values are not adjusted for the number of comparisons.
    """
    places = list(_places(suite))
    if not places:
        return None
    tests = {place: suite.rows.get((*place[:3], P_VALUE + _rival(place))) for place in places}
    told = sum(p is not None and p < MARKED for p in map(look.value, tests.values()))
    title = suite.title(
        f"Models on the same items: {told} of {len(places)} differences have p < {MARKED:g}, "
        "which is not adjusted for their number"
    )
    cells = tuple(_cells(suite, place, tests[place]) for place in places)
    return Table(suite.name("compared"), COLUMNS, cells, title=title, folded=len(cells) > MOST_OPEN)


def _places(suite: SuiteRows) -> Iterator[Place]:
    """Every comparison once, not also the other way round."""
    seen: set[Place] = set()
    for place in suite.rows:
        model, item, level, metric = place
        reverse = (metric.removeprefix(DIFFERENCE), item, level, DIFFERENCE + model)
        if metric.startswith(DIFFERENCE) and reverse not in seen:
            seen.add(place)
            yield place


def _rival(place: Place) -> str:
    return place[3].removeprefix(DIFFERENCE)


def _cells(suite: SuiteRows, place: Place, test: MetricRow | None) -> tuple[Cell, ...]:
    model, item, level, _ = place
    words = "" if level is None else f" {pixels(level) if suite.suite == 'transfer' else level}"
    row, p_value = suite.rows[place], look.value(test)
    about = (item + words.removesuffix(".0"), model, _rival(place))
    mark = significance(p_value)
    return (*about, *look.points(row), p_value, mark, row.n, look.notes([row, test]))


def significance(p_value: float | None) -> str:
    """Stars of a p-value."""
    if p_value is None:
        return "-"
    return next((stars for limit, stars in SIGNIFICANCE if p_value < limit), "not significant")
