"""Clean accuracy of every evaluated model: calibration, classes, comparisons."""

from collections.abc import Iterator

from components.report.content import Accuracy, Cell, Chart, Column, LegendEntry, Table
from components.report.evaluation import rows as look
from components.report.evaluation.plots import reliability, share_bars
from components.report.evaluation.rows import SuiteRows

NUM_BARS = 15  # classes that a chart shows; the table has all
INTRO = (
    "Unmodified test items. A model is calibrated if its "
    "confidence is its accuracy: the expected calibration error (ECE) is the mean gap between the "
    "two, weighted by the items of each bin (Guo et al. 2017)."
)


def charts(suite: SuiteRows) -> Iterator[Chart]:
    for number, model in enumerate(suite.models, start=1):
        for item in suite.items("ece"):
            if suite.found("bin_accuracy", model=model):
                yield _reliability(suite, model, item, number)
        if suite.found("class_accuracy", model=model):
            yield _classes(suite, model, number)


def _reliability(suite: SuiteRows, model: str, item: str, number: int) -> Chart:
    bins = [
        (row, suite.row(model, item, "bin_confidence", row.level))
        for row in suite.found("bin_accuracy", model=model)
        if row.item == item
    ]
    bins.sort(key=lambda pair: pair[0].level or 0)
    width = 1 / len(bins)
    drawn = [
        (confidence.value, share)
        for row, confidence in bins
        if (share := look.share(row)) and confidence is not None and confidence.value is not None
    ]
    edges = [
        ((place - 1) * width, place * width, row.n or 0) for place, (row, _) in _numbered(bins)
    ]
    error = suite.row(model, item, "ece")
    said = (
        f"ECE {100 * error.value:.2f} points on {look.num_items([error])}."
        if error and error.value is not None
        else f"No ECE: {look.reason(error)}."
    )
    name = suite.name(f"reliability-{number}")
    rows: list[tuple[Cell, ...]] = [
        (
            place,
            (place - 1) * width,
            place * width,
            row.n or 0,
            look.value(confidence, factor=100),
            look.cell(row),
        )
        for place, (row, confidence) in _numbered(bins)
    ]
    columns = (
        *(Column("bin", "number"), Column("above", "number"), Column("up to", "number")),
        *(Column("items", "number"), Column("confidence", "number", "mean, %")),
        Column("accuracy", "measured"),
    )
    return Chart(
        name,
        suite.title(f"{model}: calibration"),
        reliability(
            drawn, edges=edges, name=name, alt=f"Accuracy of {model} by confidence. {said}"
        ),
        (
            LegendEntry("accuracy of a bin at its mean confidence", "ink", "dot"),
            LegendEntry("95% interval; below, items of the bin", "measured", "line"),
            LegendEntry("a calibrated model", "muted", "dash"),
        ),
        (said, "Below the diagonal the model is overconfident.", *look.flag_sentence([error])),
        Table(name, columns, tuple(rows)),
    )


def _numbered(bins: list[look.Pair]) -> list[tuple[int, look.Pair]]:
    return list(enumerate(bins, start=1))


def _classes(suite: SuiteRows, model: str, number: int) -> Chart:
    """The worst classes as bars, all classes as a table, worst first."""
    found = suite.found("class_accuracy", model=model)
    shares = [(row.item, share) for row in found if (share := look.share(row))]
    shares.sort(key=lambda pair: (pair[1].value, pair[0]))
    empty = [row for row in found if row.value is None]
    shown = shares[:NUM_BARS]
    overall = _accuracy(suite, model)
    name = suite.name(f"classes-{number}")
    said = _extremes(shares)
    rows: list[tuple[Cell, ...]] = [(label, share, share.num_items, "") for label, share in shares]
    rows += [(row.item, look.cell(row), 0, look.reason(row)) for row in empty]
    which = (
        f"the {len(shown)} worst of {len(shares)} classes"
        if len(shown) < len(shares)
        else "all classes"
    )
    return Chart(
        name,
        suite.title(f"{model}: accuracy by class"),
        share_bars(
            [label for label, _ in shown],
            [share for _, share in shown],
            mean=overall.value if overall else None,
            kind="measured",
            x_label="accuracy, % of the items of a class",
            name=name,
            alt=f"Accuracy of {model} by class, {which}. {said}",
        ),
        (
            LegendEntry(which, "measured", "bar"),
            LegendEntry("95% interval", "ink", "line"),
            *([LegendEntry("all items", "muted", "dash")] if overall else []),
        ),
        (
            f"{said} {look.num_items(found)} per class.",
            *([f"Classes without items: {len(empty)}."] if empty else []),
        ),
        Table(
            name,
            (
                Column("Class"),
                Column("accuracy", "measured"),
                Column("n", "number"),
                Column("Note", "note"),
            ),
            tuple(rows),
        ),
    )


def _extremes(shares: list[tuple[str, Accuracy]]) -> str:
    if not shares:
        return "No class has items."
    (worst, low), (best, high) = shares[0], shares[-1]
    return f"From {low.percent('measured')} ({worst}) to {high.percent('measured')} ({best})."


def _accuracy(suite: SuiteRows, model: str) -> Accuracy | None:
    return next((look.share(row) for row in suite.found("accuracy", model=model)), None)


def tables(suite: SuiteRows) -> Iterator[Table]:
    columns = (
        *(Column("Model"), Column("Architecture"), Column("parameters", "number", "millions")),
        *(Column("GMAC", "number"), Column("pre-training")),
        *(Column("top-1", "measured"), Column("top-5", "measured")),
        *(Column("ECE", "number", "points"), Column("n", "number"), Column("Note", "note")),
    )
    cells: list[tuple[Cell, ...]] = []
    for model in suite.models:
        for item in suite.items("accuracy"):
            found = [
                suite.row(model, item, metric) for metric in ("accuracy", "top5_accuracy", "ece")
            ]
            top1, top5, error = found
            subject = suite.subject(model)
            about = (subject.arch, subject.params_m, subject.gmacs, subject.pretrain)
            cells.append(
                (
                    model,
                    *about,
                    look.cell(top1),
                    look.cell(top5),
                    look.value(error, factor=100),
                    top1.n if top1 else None,
                    look.notes(found),
                )
            )
    yield Table(suite.name("models"), columns, tuple(cells), title=suite.title("Models"))
