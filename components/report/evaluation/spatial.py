"""The spatial grid attack: accuracy, the curve over the angle, and a map of failing poses."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from components.core.shares import measured_percent
from components.report.content import Cell, Chart, Column, LegendEntry, Table
from components.report.evaluation import rows as look
from components.report.evaluation.heat_maps import HeatCell, HeatLayout, heat_map, shade_legend
from components.report.evaluation.plots import Curve, Series, curves, dots
from components.report.evaluation.rows import SuiteRows
from components.report.evaluation.signs import MAX_MODELS, ModelSign, hidden_models, sign_of

INTRO = (
    "An item counts if it is classified correctly in every rotation and shift of a grid (Engstrom "
    "et al. 2019); pixels from outside the image are black. A finer grid can only lower the "
    "accuracy, so it is an upper bound."
)
METRICS = {
    "clean_accuracy": ("unchanged", ModelSign("measured", "dot", dashed=False)),
    "accuracy": ("correct in every pose", ModelSign("attacked", "diamond", dashed=False)),
}


def charts(suite: SuiteRows, failures: Mapping[str, pa.Table]) -> Iterator[Chart]:
    for number, grid in enumerate(suite.items("accuracy"), start=1):
        yield _accuracies(suite, grid, number)
        if any(row.item == grid and row.value is not None for row in suite.found("angle_accuracy")):
            yield _angles(suite, grid, number)
    for number, model in enumerate(suite.models, start=1):
        if model in failures:
            yield _failure_chart(suite, model, failures[model], number)


def _accuracies(suite: SuiteRows, grid: str, number: int) -> Chart:
    models = [model for model in suite.models if suite.row(model, grid, "accuracy")]
    found = {metric: [suite.row(m, grid, metric) for m in models] for metric in METRICS}
    queries = [suite.row(model, grid, "mean_queries") for model in models]
    name = suite.name(f"accuracy-{number}")
    said = "; ".join(
        f"{model} {measured_percent(row.value)}%"
        for model, row in zip(models, found["accuracy"], strict=True)
        if row is not None and row.value is not None
    )
    cells: list[tuple[Cell, ...]] = [
        (
            model,
            look.cell(found["clean_accuracy"][place]),
            look.cell(found["accuracy"][place]),
            look.value(queries[place]),
            row.n if (row := found["accuracy"][place]) else None,
            look.notes([found["accuracy"][place], suite.row(model, grid, "angle_accuracy")]),
        )
        for place, model in enumerate(models)
    ]
    columns = (
        *(Column("Model"), Column("unchanged", "measured"), Column("every pose", "attacked")),
        *(Column("queries", "number", "mean"), Column("n", "number"), Column("Note", "note")),
    )
    return Chart(
        name,
        suite.title(f"Accuracy on the grid {grid}"),
        dots(
            models,
            [Series(list(map(look.share, found[m])), sign) for m, (_, sign) in METRICS.items()],
            x_label="accuracy, % of items",
            name=name,
            alt=f"Share of items that are correct in every pose: {said}.",
        ),
        (
            *(sign.legend(label) for label, sign in METRICS.values()),
            LegendEntry("lines: 95% intervals", "ink", "line"),
        ),
        (
            f"Shifts right x shifts down x angles, largest shift and angle: {grid}. "
            f"{look.num_items(found['accuracy'])} per model. Correct in every pose: {said}.",
            *look.flag_sentence(found["accuracy"]),
        ),
        Table(name, columns, tuple(cells)),
    )


def _angles(suite: SuiteRows, grid: str, number: int) -> Chart:
    rows = [row for row in suite.found("angle_accuracy") if row.item == grid]
    angles = sorted({row.level for row in rows if row.level is not None})
    shown = suite.models[:MAX_MODELS]
    series = []
    for place, model in enumerate(shown):
        points = [
            (angle, share)
            for angle in angles
            if (share := look.share(suite.row(model, grid, "angle_accuracy", angle)))
        ]
        if points:
            series.append((model, Curve(points, sign_of(place))))
    name = suite.name(f"angles-{number}")
    cells: list[tuple[Cell, ...]] = [
        (
            angle,
            *(look.cell(suite.row(m, grid, "angle_accuracy", angle)) for m in suite.models),
            *(
                look.value(suite.row(m, grid, "angle_fail_share", angle), factor=100)
                for m in suite.models
            ),
        )
        for angle in angles
    ]
    columns = (
        Column("angle", "number", "degrees"),
        *(Column(m, "attacked", "all shifts") for m in suite.models),
        *(Column(m, "number", "% of poses failing") for m in suite.models),
    )
    return Chart(
        name,
        suite.title("Accuracy by angle, worst of all shifts"),
        curves(
            [curve for _, curve in series],
            x_label="rotation, degrees",
            y_label="accuracy, % of items",
            name=name,
            alt="Share of items that are correct in all shifts, by angle: "
            + "; ".join(_lowest(model, curve) for model, curve in series)
            + ".",
        ),
        tuple(curve.sign.legend(model) for model, curve in series),
        (
            f"An item counts at an angle if all shifts are classified correctly. "
            f"{look.num_items(rows)}; bands are 95% intervals.",
            *hidden_models(len(suite.models)),
        ),
        Table(name, columns, tuple(cells)),
    )


def _lowest(model: str, curve: Curve) -> str:
    angle, share = min(curve.points, key=lambda point: (point[1].value, point[0]))
    return f"{model} lowest at {angle:g} degrees with {share.percent('attacked')}"


def _failure_chart(suite: SuiteRows, model: str, table: pa.Table, number: int) -> Chart:
    """Failures by shift at the angle with the most failures."""
    rows: list[dict[str, Any]] = table.to_pylist()
    totals: dict[float, int] = {}
    for row in rows:
        totals[row["angle"]] = totals.get(row["angle"], 0) + row["num_failures"]
    angle = min(totals, key=lambda a: (-totals[a], abs(a), a))
    at_angle = {(row["down"], row["right"]): row for row in rows if row["angle"] == angle}
    downs = sorted({down for down, _ in at_angle})
    rights = sorted({right for _, right in at_angle})
    shares = [[_fail_share(at_angle[down, right]) for right in rights] for down in downs]
    most = max(rows, key=lambda row: (row["num_worst"], row["num_failures"]))
    name = suite.name(f"failures-{number}")
    fewest = measured_percent(min(map(min, shares)))
    largest = measured_percent(max(map(max, shares)))
    num_items = rows[0]["num_items"]
    said = f"At {angle:g} degrees {fewest} to {largest}% of {num_items:,} items fail, by shift."
    return Chart(
        name,
        suite.title(f"{model}: failures by shift at {angle:g} degrees"),
        heat_map(
            [[HeatCell(share, f"{100 * share:.0f}") for share in line] for line in shares],
            HeatLayout(
                [f"{down:g}" for down in downs],
                [f"{right:g}" for right in rights],
                "shift to the right, pixels",
                "shift down, pixels",
            ),
            kind="attacked",
            name=name,
            alt=f"Failures of {model}. {said}",
        ),
        (shade_legend("share of items that fail, in percent", "attacked"),),
        (
            f"{said} This is the angle with the most failures.",
            f"The pose that is the worst of most items, by loss: {_pose(most)}, "
            f"{most['num_worst']:,} items.",
        ),
        Table(name, _failure_columns(), tuple(_failure_rows(list(at_angle.values())))),
    )


def _fail_share(row: Mapping[str, Any]) -> float:
    return float(row["num_failures"] / row["num_items"])


def _pose(row: Mapping[str, Any]) -> str:
    return f"{row['angle']:g} degrees, {row['right']:g} px right, {row['down']:g} px down"


def _failure_columns() -> tuple[Column, ...]:
    named = (("angle", "degrees"), ("right", "px"), ("down", "px"))
    counts = (("failures", "items"), ("worst", "items"), ("n", ""))
    return tuple(Column(title, "number", detail) for title, detail in (*named, *counts))


def _failure_rows(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Cell, ...]]:
    keys = ("angle", "right", "down", "num_failures", "num_worst", "num_items")
    for row in rows:
        yield tuple(row[key] for key in keys)
