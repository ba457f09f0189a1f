"""Shape against texture on conflict stimuli, overall and by class."""

from collections.abc import Mapping, Sequence

from components.core.shares import measured_percent
from components.evaluate.metrics import MetricRow
from components.evaluate.shape_bias import CLASSES
from components.report.content import Cell, Chart, Column, LegendEntry, Table
from components.report.evaluation import rows as look
from components.report.evaluation.plots import Series, dots
from components.report.evaluation.rows import SuiteRows
from components.report.evaluation.signs import MAX_MODELS, hidden_models, sign_of

ALL = "all"
ACCURACIES = {
    "shape_acc": ("shape", "all images"),
    "shape_acc_conflict": ("shape", "in conflict"),
    "texture_acc": ("texture", "in conflict"),
}
INTRO = (
    "Images with the shape of one class and the texture of another (Geirhos et al. 2019), decided "
    "among 16 classes. Shape accuracy counts all images; shape bias is the share of shape among "
    "images in conflict that were decided for their shape or their texture."
)


def charts(suite: SuiteRows) -> tuple[Chart, ...]:
    return _accuracies(suite), _biases(suite)


def _accuracies(suite: SuiteRows) -> Chart:
    """Shape and texture accuracy of every model."""
    shown = suite.models[:MAX_MODELS]
    rows = {m: [suite.row(m, ALL, metric) for metric in ACCURACIES] for m in suite.models}
    labels = [f"{what}, {of}" for what, of in ACCURACIES.values()]
    said = "; ".join(
        f"{model} "
        + ", ".join(
            f"{label} {measured_percent(row.value)}%"
            for label, row in zip(labels, rows[model], strict=True)
            if row is not None and row.value is not None
        )
        for model in shown
    )
    name = suite.name("accuracy")
    cells: list[tuple[Cell, ...]] = [
        (
            m,
            *map(look.cell, found),
            *(row.n if row else None for row in found[:2]),
            look.notes(found),
        )
        for m, found in rows.items()
    ]
    columns = (
        Column("Model"),
        *(Column(f"{what} accuracy", "measured", of) for what, of in ACCURACIES.values()),
        *(
            Column("n", "number", "all"),
            Column("n", "number", "in conflict"),
            Column("Note", "note"),
        ),
    )
    return _dot_chart(
        suite,
        rows,
        title="Decisions for shape and for texture",
        labels=labels,
        x_label="accuracy, % of images",
        alt=f"Accuracy on conflict stimuli: {said}.",
        key="{}",
        note=f"{look.num_items(_every(rows))}.",
        table=Table(name, columns, tuple(cells)),
    )


def _biases(suite: SuiteRows) -> Chart:
    """Shape bias of each class, and overall as a line."""
    shown = suite.models[:MAX_MODELS]
    rows = {m: [suite.row(m, item, "shape_bias") for item in (ALL, *CLASSES)] for m in suite.models}
    name = suite.name("bias")
    said = "; ".join(
        f"{model} {measured_percent(row.value)}%"
        if (row := rows[model][0]) is not None and row.value is not None
        else f"{model} none ({look.reason(row)})"
        for model in shown
    )
    cells: list[tuple[Cell, ...]] = [
        (
            item,
            *(look.cell(rows[m][place]) for m in suite.models),
            *(row.n if (row := rows[m][place]) else None for m in suite.models),
            look.notes(rows[m][place] for m in suite.models),
        )
        for place, item in enumerate((ALL, *CLASSES))
    ]
    columns = (
        Column("Shape class"),
        *(Column(model, "measured", "shape bias") for model in suite.models),
        *(Column("n", "number", model) for model in suite.models),
        Column("Note", "note"),
    )
    return _dot_chart(
        suite,
        rows,
        title="Shape bias by class",
        labels=CLASSES,
        means=[look.value(rows[model][0]) for model in shown],
        x_label="shape bias, % of decided images",
        alt=f"Shape bias over all classes: {said}. The table has every class.",
        key="{}; dashed: all classes",
        note=f"All classes: {said}. {look.num_items(_every(rows))} decided for shape or texture.",
        table=Table(name, columns, tuple(cells)),
    )


def _every(rows: Mapping[str, Sequence[MetricRow | None]]) -> list[MetricRow | None]:
    return [row for found in rows.values() for row in found]


def _dot_chart(
    suite: SuiteRows,
    rows: Mapping[str, Sequence[MetricRow | None]],
    *,
    title: str,
    labels: Sequence[str],
    means: Sequence[float | None] = (),
    x_label: str,
    alt: str,
    key: str,
    note: str,
    table: Table,
) -> Chart:
    """One dot per label of the first models, from their last rows.

    `key` formats the name of a model in the legend.
    """
    shown = suite.models[:MAX_MODELS]
    series = [
        Series([look.share(row) for row in rows[model][-len(labels) :]], sign_of(number))
        for number, model in enumerate(shown)
    ]
    return Chart(
        table.name,
        suite.title(title),
        dots(labels, series, means=means, x_label=x_label, name=table.name, alt=alt),
        (
            *(sign_of(number).legend(key.format(model)) for number, model in enumerate(shown)),
            LegendEntry("lines: 95% intervals", "ink", "line"),
        ),
        (note, *look.flag_sentence(_every(rows)), *hidden_models(len(suite.models))),
        table,
    )
