"""All suites at a glance: one row per model, benchmarks against clean accuracy, attacks."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

from components.evaluate.metrics import MetricRow
from components.report.content import Cell, Chapter, Chart, Column, LegendEntry, Table
from components.report.evaluation import corruptions, shape_bias, transfer
from components.report.evaluation import rows as look
from components.report.evaluation.plots import Bubble, Series, bubbles, dots
from components.report.evaluation.rows import SuiteRows
from components.report.evaluation.signs import MAX_MODELS, ModelSign, hidden_models, sign_of

CLEAN = "clean"
INTRO = (
    "One row per model, with 95% intervals, of a mean over items for "
    "scores over several variants. The chapters below hold every number."
)
NAME = "evaluate.overview"


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A column of the overview: its heading, and one number per model."""

    column: Column
    rows: Mapping[str, MetricRow]
    is_share: bool = True

    def cell(self, model: str) -> Cell:
        """The number of a model, as its column shows it."""
        row = self.rows.get(model)
        return look.share_cell(row, self.column) if self.is_share else look.value(row)


def chapter(parts: Mapping[str, SuiteRows]) -> Chapter | None:
    """The overview of suites with one setting; None with fewer than two of them."""
    found = benchmarks(parts)
    if len(parts) < 2 or not found:
        return None
    models = list(dict.fromkeys(model for b in found for model in b.rows))
    table = Table(
        NAME,
        (Column("Model"), *(b.column for b in found), Column("Note", "note")),
        tuple(
            (model, *(b.cell(model) for b in found), look.notes(b.rows.get(model) for b in found))
            for model in models
        ),
    )
    charts = [chart for chart in (_bubbles(found, models, parts), _attacks(found, models)) if chart]
    return Chapter("evaluation", "Evaluation", INTRO, charts=tuple(charts), tables=(table,))


def benchmarks(parts: Mapping[str, SuiteRows]) -> list[Benchmark]:
    """The columns that some model has a row for, clean accuracy first."""
    found: list[Benchmark] = []

    def add(suite: str, item: str, metric: str, title: str, detail: str = "") -> None:
        part = parts.get(suite)
        rows = {m: row for m in part.models if (row := part.row(m, item, metric))} if part else {}
        if rows:
            found.append(Benchmark(look.share_column(title, detail, rows.values()), rows))

    for item in _items(parts, "clean", "accuracy")[:1]:
        add("clean", item, "accuracy", "Clean")
    for name in ("mean75", "mean95"):
        add("corruptions", corruptions.ALL, name, "Corruptions", name)
    if (part := parts.get("corruptions")) and (errors := _of_all(part, "mce")):
        found.append(Benchmark(Column("mCE", "number", "AlexNet = 100"), errors, is_share=False))
    for item in _items(parts, "shifts", "masked"):
        for protocol in ("masked", "unmasked"):
            add("shifts", item, protocol, item, protocol)
    add("shape_bias", shape_bias.ALL, "shape_acc", "Shape accuracy")
    add("shape_bias", shape_bias.ALL, "shape_bias", "Shape bias")
    if part := parts.get("transfer"):
        found += [_white_box(part, attack) for attack in transfer.attacks_of(part)]
    if part := parts.get("spatial"):
        found += [_spatial(part, grid) for grid in part.items("accuracy")]
    return found


def _items(parts: Mapping[str, SuiteRows], suite: str, metric: str) -> tuple[str, ...]:
    return parts[suite].items(metric) if suite in parts else ()


def _of_all(suite: SuiteRows, metric: str) -> dict[str, MetricRow]:
    return {m: row for m in suite.models if (row := suite.row(m, corruptions.ALL, metric))}


def _spatial(suite: SuiteRows, grid: str) -> Benchmark:
    rows = {m: row for m in suite.models if (row := suite.row(m, grid, "accuracy"))}
    return Benchmark(Column("Spatial", "attacked", grid), rows)


def _white_box(suite: SuiteRows, attack: transfer.Attack) -> Benchmark:
    """The diagonal of a transfer matrix."""
    rows = {
        model: row
        for model in suite.models
        if (row := transfer.cell(suite, attack, model, model, "accuracy"))
    }
    return Benchmark(Column("White box", "attacked", attack.title), rows)


def headline_columns(parts: Mapping[str, SuiteRows]) -> dict[Column, dict[str, Cell]]:
    """Columns of the report's headline: those of the overview that have intervals."""
    return {
        b.column: {m: look.cell(row) for m, row in b.rows.items()}
        for b in benchmarks(parts)
        if b.is_share and b.column.kind != "number"
    }


def _bubbles(
    found: list[Benchmark], models: list[str], parts: Mapping[str, SuiteRows]
) -> Chart | None:
    """Measured benchmarks against clean accuracy; dots grow with the number of parameters."""
    clean = next((b for b in found if b.column.title == "Clean"), None)
    shown = [b for b in found if b is not clean and b.is_share and b.column.kind != "attacked"]
    if clean is None or not shown or len(clean.rows) < 2:
        return None
    sizes = {m: parts["clean"].subject(m).params_m for m in clean.rows}
    largest = max((size for size in sizes.values() if size), default=1.0)
    panels, cells = [], []
    for b in shown:
        drawn = []
        for number, model in enumerate(models[:MAX_MODELS]):
            x, y = look.value(clean.rows.get(model)), look.value(b.rows.get(model))
            if x is not None and y is not None:
                size = 4 + 8 * sqrt((sizes[model] or 0) / largest)
                drawn.append(Bubble(x, y, size, sign_of(number)))
                cells.append((_title(b), model, sizes[model], 100 * x, 100 * y))
        panels.append((_title(b), drawn))
    name = f"{NAME}.clean"
    columns = (
        *(Column("Benchmark"), Column("Model"), Column("parameters", "number", "millions")),
        *(Column("clean", "number", "%"), Column("benchmark", "number", "%")),
    )
    return Chart(
        name,
        "Benchmarks against clean accuracy",
        bubbles(
            panels,
            x_label="clean accuracy, %",
            name=name,
            alt=f"{len(panels)} benchmarks against clean accuracy of {len(clean.rows)} models; the "
            "table has every number.",
        ),
        (
            *(sign_of(n).legend(model) for n, model in enumerate(models[:MAX_MODELS])),
            LegendEntry("as accurate as on clean items", "muted", "dash"),
        ),
        ("Larger signs have more parameters.", *hidden_models(len(models))),
        Table(name, columns, tuple(cells)),
    )


def _attacks(found: list[Benchmark], models: list[str]) -> Chart | None:
    """Clean accuracy and accuracy under each attack, with intervals."""
    attacked = [b for b in found if b.column.kind == "attacked"]
    if not attacked:
        return None
    clean = [b for b in found if b.column.title == "Clean"]
    drawn = [
        *((b, ModelSign("measured", "dot", dashed=False)) for b in clean),
        *((b, sign_of(number)) for number, b in enumerate(attacked[:MAX_MODELS])),
    ]
    name = f"{NAME}.attacks"
    labels = [f"{b.column.title} {b.column.detail}".strip() for b, _ in drawn]
    cells: list[tuple[Cell, ...]] = [(m, *(b.cell(m) for b, _ in drawn)) for m in models]
    return Chart(
        name,
        "Accuracy under gradient and spatial attacks",
        dots(
            models,
            [Series([look.share(b.rows.get(m)) for m in models], sign) for b, sign in drawn],
            x_label="accuracy, % of items",
            name=name,
            alt="Clean accuracy and accuracy under attack of each model; the table has every "
            "number.",
        ),
        (
            *(sign.legend(label) for label, (_, sign) in zip(labels, drawn, strict=True)),
            LegendEntry("lines: 95% intervals", "ink", "line"),
        ),
        (f"{look.num_items(row for b in attacked for row in b.rows.values())} under attack.",),
        Table(name, (Column("Model"), *(b.column for b, _ in drawn)), tuple(cells)),
    )


def _title(benchmark: Benchmark) -> str:
    return f"{benchmark.column.title} {benchmark.column.detail}".strip()
