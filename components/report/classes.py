"""Chapter of the classes: accuracy of each class before and after attacks, and confusions."""

from collections.abc import Iterator, Sequence

import numpy as np

from components.core.statistics import accuracy
from components.core.types import IntArray
from components.report.content import Accuracy, Cell, Chapter, Chart, Column, ResultKind, Table
from components.report.evaluation.heat_maps import HeatCell, HeatLayout, heat_map, shade_legend
from components.report.records import AttackResult, ItemOutcomes

MAX_CLASSES = 20  # of a matrix; more would not be legible, the table of confusions has all
MAX_MODELS = 4  # with matrices
MOST_OPEN = 12  # rows of the table of classes; more are folded
MOST_CONFUSIONS = 10  # rows per model if there are too many classes for a matrix


def chapter(attacks: Sequence[AttackResult], classes: Sequence[str]) -> Chapter | None:
    """Accuracy by class and confusions under every attack list; None without results per item."""
    known = [a for a in attacks if any(model.items for model in a.models.values())]
    if not known:
        return None
    return Chapter(
        "classes",
        "By class",
        "An item counts after the attacks if no attack of the list broke it. The last column is "
        "the class that most of the wrong predictions after the attacks name.",
        charts=tuple(chart for attack in known for chart in _charts(attack, classes)),
        tables=tuple(table for attack in known for table in _tables(attack, classes)),
    )


def _models(attack: AttackResult) -> list[tuple[str, ItemOutcomes]]:
    return [(name, model.items) for name, model in attack.models.items() if model.items]


def _tables(attack: AttackResult, classes: Sequence[str]) -> Iterator[Table]:
    yield _class_table(attack, classes)
    if len(classes) > MAX_CLASSES:
        yield _confusion_table(attack, classes)


def _class_table(attack: AttackResult, classes: Sequence[str]) -> Table:
    columns = (
        *(Column("Model"), Column("Class"), Column("clean", "measured")),
        *(Column("left", "attacked", f"after {attack.title}"), Column("mostly taken for")),
    )
    rows: list[tuple[Cell, ...]] = []
    for model, items in _models(attack):
        for label, name in enumerate(classes):
            own = items.label == label
            if own.any():
                clean, left = (_share(p[own] == label) for p in (items.clean, items.attacked))
                rows.append(
                    (model, name, clean, left, _mostly(items.attacked[own], label, classes))
                )
    folded = len(rows) > MOST_OPEN
    title = f"{attack.name}: accuracy by class"
    return Table(f"{attack.name}.classes", columns, tuple(rows), title=title, folded=folded)


def _share(held: np.ndarray) -> Accuracy:
    return Accuracy.parse(accuracy(held), where="attacks.parquet")


def _mostly(predictions: IntArray, label: int, classes: Sequence[str]) -> str:
    """The most frequent wrong prediction with its count; ties go to the lower class."""
    counts = np.bincount(predictions, minlength=len(classes))
    counts[label] = 0
    top = int(counts.argmax())
    return f"{classes[top]} ({counts[top]})" if counts[top] else "-"


def confusion(labels: IntArray, predictions: IntArray, *, num_classes: int) -> IntArray:
    """(K, K) counts: row label, column prediction."""
    counts = np.zeros((num_classes, num_classes), dtype=np.int64)
    np.add.at(counts, (labels, predictions), 1)
    return counts


def _confusion_table(attack: AttackResult, classes: Sequence[str]) -> Table:
    """The most frequent confusions after the attacks."""
    rows: list[tuple[Cell, ...]] = []
    for model, items in _models(attack):
        counts = confusion(items.label, items.attacked, num_classes=len(classes))
        np.fill_diagonal(counts, 0)
        for place in np.argsort(-counts, axis=None, kind="stable")[:MOST_CONFUSIONS].tolist():
            label, taken = divmod(place, len(classes))
            if counts[label, taken]:
                rows.append((model, classes[label], classes[taken], int(counts[label, taken])))
    columns = (Column("Model"), Column("Class"), Column("taken for"), Column("items", "number"))
    title = f"{attack.name}: most frequent confusions after the attacks"
    return Table(f"{attack.name}.confusions", columns, tuple(rows), title=title)


def _charts(attack: AttackResult, classes: Sequence[str]) -> Iterator[Chart]:
    if len(classes) > MAX_CLASSES:
        return
    for number, (model, items) in enumerate(_models(attack)[:MAX_MODELS], start=1):
        parts: tuple[tuple[ResultKind, str, IntArray], ...] = (
            ("measured", "clean", items.clean),
            ("attacked", f"after {attack.title}", items.attacked),
        )
        for kind, when, found in parts:
            name = f"{attack.name}.confusion-{kind}-{number}"
            counts = confusion(items.label, found, num_classes=len(classes))
            yield _matrix(counts, classes, title=f"{model}, {when}", kind=kind, name=name)


def _matrix(
    counts: IntArray, classes: Sequence[str], *, title: str, kind: ResultKind, name: str
) -> Chart:
    shares = counts / counts.sum(axis=1, keepdims=True).clip(min=1)
    right, num_items = int(np.trace(counts)), int(counts.sum())
    cells = [
        [HeatCell(share, str(count) if count else "") for share, count in zip(*row, strict=True)]
        for row in zip(shares.tolist(), counts.tolist(), strict=True)
    ]
    rows: list[tuple[Cell, ...]] = [
        (label, *row) for label, row in zip(classes, counts.tolist(), strict=True)
    ]
    said = f"{right:,} of {num_items:,} items are on the diagonal: right."
    return Chart(
        name,
        f"Confusions: {title}",
        heat_map(
            cells,
            HeatLayout(classes, classes, "prediction", "label", rotated=True),
            kind=kind,
            name=name,
            alt=f"Counts by label and prediction, {title}. {said}",
        ),
        (shade_legend("share of the items of a label", kind),),
        (said,),
        Table(name, (Column("label"), *(Column(c, "number") for c in classes)), tuple(rows)),
    )
