"""Distribution shifts: masked and unmasked accuracy, clean accuracy on the same classes, gap."""

from collections.abc import Iterator

from components.report.content import Cell, Chart, Column, LegendEntry, Table
from components.report.evaluation import rows as look
from components.report.evaluation.plots import Series, dots
from components.report.evaluation.rows import SuiteRows
from components.report.evaluation.signs import ModelSign

METRICS = {
    "masked": ("shifted, masked", ModelSign("violet", "diamond", dashed=False)),
    "unmasked": ("shifted, unmasked", ModelSign("teal", "square", dashed=False)),
    "clean_masked": ("clean items of these classes, masked", ModelSign("ink", "dot", dashed=False)),
}
INTRO = (
    "Accuracy on other datasets of the same classes. Masked: only classes of the shifted dataset "
    "compete, the protocol of ImageNet-R and -A (Hendrycks et al. 2021); unmasked: all classes of "
    "the model do. The gap is clean minus shifted accuracy, on the same classes with the same "
    "protocol. Compare with published figures of the same protocol only."
)


def charts(suite: SuiteRows) -> Iterator[Chart]:
    for item in suite.items("masked"):
        yield _chart(suite, item)


def _chart(suite: SuiteRows, item: str) -> Chart:
    models = [model for model in suite.models if suite.row(model, item, "masked")]
    series = [
        Series([look.share(suite.row(model, item, metric)) for model in models], sign)
        for metric, (_, sign) in METRICS.items()
    ]
    name = suite.name(f"shift-{suite.items('masked').index(item) + 1}")
    shifted = [suite.row(model, item, "masked") for model in models]
    clean = [suite.row(model, item, "clean_masked") for model in models]
    return Chart(
        name,
        suite.title(f"{item}: shifted and clean accuracy"),
        dots(
            models,
            series,
            x_label="accuracy, % of items",
            name=name,
            alt=f"Accuracy on {item}: {'; '.join(_sentences(suite, item, models))}.",
        ),
        (
            *(sign.legend(label) for label, sign in METRICS.values()),
            LegendEntry("lines: 95% intervals", "ink", "line"),
        ),
        (
            f"{look.num_items(shifted)} of {item}, {look.num_items(clean)} of the clean dataset.",
            *look.flag_sentence([*shifted, *clean]),
        ),
        _table(suite, item, models, name),
    )


def _sentences(suite: SuiteRows, item: str, models: list[str]) -> Iterator[str]:
    for model in models:
        share = look.share(suite.row(model, item, "masked"))
        gap = look.points(suite.row(model, item, "gap_masked"))[0]
        behind = "" if gap is None else f", {gap:.1f} points behind clean items"
        yield f"{model} {share.percent('measured')} masked{behind}" if share else f"{model} none"


def _table(suite: SuiteRows, item: str, models: list[str], name: str) -> Table:
    protocols = ("masked", "unmasked")
    columns = [Column("Model")]
    for protocol in protocols:
        columns += [
            Column("shifted", "measured", protocol),
            Column("clean", "measured", protocol),
            Column("gap", "number", f"{protocol}, points"),
            Column("at least", "number", "95%"),
            Column("at most", "number", "95%"),
        ]
    columns += [
        *(Column("n shifted", "number"), Column("n clean", "number"), Column("Note", "note")),
    ]
    cells: list[tuple[Cell, ...]] = []
    for model in models:
        found = {
            metric: suite.row(model, item, metric)
            for p in protocols
            for metric in (p, f"clean_{p}", f"gap_{p}")
        }
        line: list[Cell] = [model]
        for p in protocols:
            line += [look.cell(found[p]), look.cell(found[f"clean_{p}"])]
            line += look.points(found[f"gap_{p}"])
        counts = [row.n if row else None for row in (found["masked"], found["clean_masked"])]
        cells.append((*line, *counts, look.notes(found.values())))
    return Table(name, tuple(columns), tuple(cells))
