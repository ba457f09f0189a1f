"""Common corruptions: a heat map per model, lines for several, and the scores of the benchmark."""

from collections.abc import Iterator

from components.core.shares import measured_percent
from components.data.corruptions.settings import CORRUPTIONS
from components.data.sources.names import SEVERITIES
from components.evaluate.corruptions import groups
from components.report.content import Cell, Chart, Column, Table
from components.report.evaluation import rows as look
from components.report.evaluation.heat_maps import HeatCell, HeatLayout, heat_map, shade_legend
from components.report.evaluation.plots import Curve, small_multiples
from components.report.evaluation.rows import SuiteRows
from components.report.evaluation.signs import MAX_MODELS, hidden_models, sign_of

ALL = "all"  # the item of scores over several variants
MEANS = ("mean75", "mean95", *(f"mean_{group}" for group in groups()))
ERRORS = ("mce", "relative_mce")
INTRO = (
    "Accuracy on test images with a corruption at five severities (Hendrycks & Dietterich 2019). "
    "mean75 averages the 15 corruptions of the benchmark, mean95 all 19. mCE and relative mCE "
    "divide errors by those of AlexNet, which has 100; lower is better. A score that lacks a part "
    "is empty and says why; intervals of means are over items. Error need not grow with severity."
)


def charts(suite: SuiteRows) -> Iterator[Chart]:
    for number, model in enumerate(suite.models, start=1):
        if _names(suite, model):
            yield _heat(suite, model, number)
    if len(suite.models) > 1:
        yield _lines(suite)


def _names(suite: SuiteRows, model: str) -> list[str]:
    """The corruptions of a model, in the order of the benchmark."""
    known = {row.item for row in suite.found("accuracy", model=model)}
    return [name for name in CORRUPTIONS if name in known]


def _heat(suite: SuiteRows, model: str, number: int) -> Chart:
    names = _names(suite, model)
    rows = [[suite.row(model, name, "accuracy", level) for level in SEVERITIES] for name in names]
    cells = [
        [
            None
            if row is None or row.value is None
            else HeatCell(1 - row.value, measured_percent(row.value))
            for row in line
        ]
        for line in rows
    ]
    group_of = {name: group for group, members in groups().items() for name in members}
    breaks = [
        place
        for place in range(1, len(names))
        if group_of[names[place]] != group_of[names[place - 1]]
    ]
    chart_name = suite.name(f"heat-{number}")
    present = [row for line in rows for row in line]
    lowest, where, level = min(
        (row.value, _words(row.item), row.level)
        for row in present
        if row is not None and row.value is not None
    )
    said = f"Lowest: {where} at severity {level:g}, {measured_percent(lowest)}%."
    layout = HeatLayout(
        [_words(name) for name in names],
        [str(level) for level in SEVERITIES],
        "severity",
        row_breaks=breaks,
    )
    return Chart(
        chart_name,
        suite.title(f"{model}: accuracy by corruption and severity"),
        heat_map(
            cells,
            layout,
            kind="measured",
            name=chart_name,
            alt=f"Accuracy of {model} under {len(names)} corruptions at five severities, in "
            f"percent. {said}",
        ),
        (shade_legend("the darker, the more errors; numbers: accuracy in percent", "measured"),),
        (
            f"{said} {look.num_items(present)} per cell; lines separate "
            f"{', '.join(dict.fromkeys(group_of[name] for name in names))}. Intervals are in the "
            "table.",
            *look.flag_sentence(present),
        ),
        _heat_table(suite, model, names, chart_name),
    )


def _heat_table(suite: SuiteRows, model: str, names: list[str], name: str) -> Table:
    columns = (
        *(Column("Corruption"), Column("Group")),
        *(Column(f"severity {level}", "measured") for level in SEVERITIES),
        Column("CE", "number", "AlexNet = 100"),
        Column("n", "number"),
        Column("Note", "note"),
    )
    group_of = {name: group for group, members in groups().items() for name in members}
    cells: list[tuple[Cell, ...]] = []
    for corruption in names:
        found = [suite.row(model, corruption, "accuracy", level) for level in SEVERITIES]
        error = suite.row(model, ALL, f"ce_{corruption}")
        counts = {row.n for row in found if row is not None and row.n is not None}
        cells.append(
            (
                corruption,
                group_of[corruption],
                *(look.cell(row) for row in found),
                look.value(error),
                max(counts, default=None),
                look.notes([*found, error]),
            )
        )
    return Table(name, columns, tuple(cells))


def _lines(suite: SuiteRows) -> Chart:
    """Every corruption in its own panel, one line per model."""
    shown = suite.models[:MAX_MODELS]
    names = [name for name in CORRUPTIONS if any(name in _names(suite, m) for m in suite.models)]
    panels = []
    for corruption in names:
        series = []
        for number, model in enumerate(shown):
            found = [
                (float(level), share)
                for level in SEVERITIES
                if (share := look.share(suite.row(model, corruption, "accuracy", level)))
            ]
            if found:
                series.append(Curve(found, sign_of(number)))
        panels.append((_words(corruption), series))
    chart_name = suite.name("lines")
    rows: list[tuple[Cell, ...]] = [
        (
            corruption,
            level,
            *(look.cell(suite.row(m, corruption, "accuracy", level)) for m in suite.models),
        )
        for corruption in names
        for level in SEVERITIES
    ]
    return Chart(
        chart_name,
        suite.title("Accuracy by severity, all models"),
        small_multiples(
            panels,
            num_columns=3,
            x_label="severity",
            name=chart_name,
            alt=f"Accuracy by severity of {', '.join(shown)}, one panel for each of "
            f"{len(names)} corruptions; the table has every number.",
        ),
        tuple(sign_of(number).legend(model) for number, model in enumerate(shown)),
        (
            f"{look.num_items(suite.found('accuracy'))} per point; intervals are in the table.",
            *hidden_models(len(suite.models)),
        ),
        Table(
            chart_name,
            (
                *(Column("Corruption"), Column("severity", "number")),
                *(Column(model, "measured") for model in suite.models),
            ),
            tuple(rows),
        ),
    )


def tables(suite: SuiteRows) -> Iterator[Table]:
    """Scores of all models, and their differences on the same items."""
    found = {name: {m: suite.row(m, ALL, name) for m in suite.models} for name in (*MEANS, *ERRORS)}
    means = [look.share_column(name, "", found[name].values()) for name in MEANS]
    columns = (
        *(Column("Model"), *means),
        Column("mCE", "number", "AlexNet = 100"),
        Column("relative mCE", "number", "AlexNet = 100"),
        Column("n", "number"),
        Column("Note", "note"),
    )
    cells: list[tuple[Cell, ...]] = []
    for model in suite.models:
        counts = [row.n for row in suite.found("accuracy", model=model) if row.n is not None]
        cells.append(
            (
                model,
                *(look.share_cell(found[c.title][model], c) for c in means),
                *(look.value(found[name][model]) for name in ERRORS),
                min(counts, default=None),
                look.notes(found[name][model] for name in (*MEANS, *ERRORS)),
            )
        )
    yield Table(suite.name("scores"), columns, tuple(cells), title=suite.title("Scores"))


def _words(name: str) -> str:
    return name.replace("_", " ")
