"""Charts of analyses with legend, caption and the table behind each."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from components.core.shares import measured_percent
from components.core.types import FloatArray
from components.evaluate.metrics import Measurement
from components.report.analysis.figures import (
    Curve,
    Density,
    density_rows,
    heat_map,
    level_curves,
)
from components.report.content import Accuracy, Cell, Chart, Column, LegendEntry, Table

PART_COLOURS = {"block": "ink", "attn": "attacked", "mlp": "proven", "local": "measured"}
PART_WORDS = {
    "block": "whole block",
    "attn": "attention",
    "mlp": "MLP",
    "local": "local patch interaction",
}
RESTRICTED = {  # item: (label, colour, dashed)
    "spatial": ("near patches only", "proven", False),
    "random": ("random pairs, equally many", "proven", True),
    "cls_first": ("in the first k blocks", "attacked", False),
    "cls_last": ("in the last k blocks", "attacked", True),
    "local_first": ("in the first k blocks", "attacked", False),
    "local_last": ("in the last k blocks", "attacked", True),
}
RESTRICTED_CHARTS = (  # items, title, axis
    (("spatial", "random"), "Attention between near patches only", "largest distance d, patches"),
    (("cls_first", "cls_last"), "No attention between patches", "number of blocks k"),
    (("local_first", "local_last"), "No local patch interaction", "number of blocks k"),
)
STATES = {  # (images, scaling): (label, colour, dashed)
    ("clean", "before"): ("clean", "measured", False),
    ("attacked", "before"): ("attacked", "attacked", False),
    ("clean", "after"): ("clean, scaled attention", "measured", True),
    ("attacked", "after"): ("attacked, scaled attention", "attacked", True),
}


def correlation_chart(
    matrix: FloatArray, blocks: Sequence[str], *, title: str, method: str, name: str
) -> Chart:
    """Heat map of the similarity of all pairs of blocks; `method` explains the measure."""
    near = [float(matrix[i, i + 1]) for i in range(len(matrix) - 1)]
    known = [value for value in near if np.isfinite(value)]
    mean = f"{np.mean(known):.3f}" if known else "undefined"
    alt = f"{title}: {len(blocks)} blocks; mean of neighbouring blocks {mean}."
    columns = (Column("block"), *(Column(block, "number") for block in blocks))
    rows: list[tuple[Cell, ...]] = [
        (block, *(float(v) if np.isfinite(v) else None for v in row))
        for block, row in zip(blocks, matrix, strict=True)
    ]
    return Chart(
        name,
        title,
        heat_map(matrix, borders=stage_borders(blocks), name=name, alt=alt),
        (LegendEntry("1: equal up to what the measure ignores; no colour: 0", "proven", "bar"),),
        (method, f"Mean of neighbouring blocks: {mean}."),
        Table(name, columns, tuple(rows)),
    )


def stage_borders(blocks: Sequence[str]) -> list[int]:
    """Where a new stage begins: the path before a block's number changes."""
    stages = [block.rpartition(".")[0] for block in blocks]
    return [place for place, (a, b) in enumerate(pairwise(stages), start=1) if a != b]


def lesion_charts(found: Sequence[Measurement], *, model: str, name: str) -> Iterator[Chart]:
    """Accuracy without one part, and without n parts: mean, standard error, lowest to highest."""
    clean = next((m for m in found if m.item == "none"), None)
    reference = None if clean is None or clean.value is None else clean.value
    if singles := _by_item(found, "single_accuracy"):
        yield _single_chart(singles, reference, title=f"{model}: one part removed", name=name)
    if _by_item(found, "mean_accuracy"):
        title = f"{model}: several parts removed, the first block kept"
        yield _several_chart(found, reference, title=title, name=f"{name}-several")


def _single_chart(
    singles: Mapping[str, Sequence[Measurement]], reference: float | None, *, title: str, name: str
) -> Chart:
    curves = [
        _accuracy_curve(rows, colour=PART_COLOURS[part], dashed=False)
        for part, rows in singles.items()
    ]
    rows: list[tuple[Cell, ...]] = [
        (PART_WORDS[part], int(row.level or 0), _accuracy(row))
        for part, group in singles.items()
        for row in group
    ]
    columns = (Column("removed"), Column("block", "number"), Column("accuracy", "measured"))
    alt = f"{title}: " + "; ".join(_lowest(part, group) for part, group in singles.items())
    svg = level_curves(curves, label="block", reference=reference, name=name, alt=alt)
    caption = "Removed at inference: the residual stream passes the part unchanged. Bands: 95%."
    return Chart(
        name, title, svg, _legend(singles, reference), (caption,), Table(name, columns, tuple(rows))
    )


def _lowest(part: str, rows: Sequence[Measurement]) -> str:
    worst = min(rows, key=lambda row: (row.value or 0.0, row.level or 0.0))
    share = 100 * (worst.value or 0.0)
    return f"{PART_WORDS[part]} lowest at block {int(worst.level or 0)} with {share:.2f}%"


def _several_chart(
    found: Sequence[Measurement], reference: float | None, *, title: str, name: str
) -> Chart:
    values = {(m.item, m.level, m.metric): m.value for m in found}
    means = _by_item(found, "mean_accuracy")
    curves, rows = [], []
    for part, group in means.items():
        levels = [row.level or 0.0 for row in group]
        low, high = (
            tuple(values[part, level, metric] or 0.0 for level in levels)
            for metric in ("min_accuracy", "max_accuracy")
        )
        errors = tuple(values.get((part, level, "standard_error")) or 0.0 for level in levels)
        shares = tuple(row.value or 0.0 for row in group)
        curves.append(Curve(tuple(levels), shares, low, high, PART_COLOURS[part], errors=errors))
        for place, level in enumerate(levels):
            error = values.get((part, level, "standard_error"))
            sets = values.get((part, level, "num_sets"))
            numbers = (shares[place], error, low[place], high[place])
            rows.append((PART_WORDS[part], int(level), int(sets or 0), *numbers))
    titles = ("n", "sets", "mean", "standard error", "lowest", "highest")
    columns = (Column("removed"), *(Column(word, "number") for word in titles))
    alt = f"{title}: " + "; ".join(
        f"{PART_WORDS[part]}, mean {measured_percent(group[0].value or 0)}% without "
        f"{int(group[0].level or 0)}, {measured_percent(group[-1].value or 0)}% without "
        f"{int(group[-1].level or 0)}"
        for part, group in means.items()
    )
    svg = level_curves(curves, label="removed parts n", reference=reference, name=name, alt=alt)
    caption = "Line: mean over random sets. Bars: standard error. Bands: lowest to highest."
    return Chart(
        name, title, svg, _legend(means, reference), (caption,), Table(name, columns, tuple(rows))
    )


def _legend(
    parts: Mapping[str, Sequence[Measurement]], reference: float | None
) -> tuple[LegendEntry, ...]:
    entries = [LegendEntry(PART_WORDS[part], PART_COLOURS[part], "line") for part in parts]
    if reference is not None:
        entries.append(LegendEntry("whole network", "muted", "dash"))
    return tuple(entries)


def restricted_charts(found: Sequence[Measurement], *, model: str, name: str) -> Iterator[Chart]:
    """Accuracy over d (near pairs solid, random dashed) and over k (first solid, last dashed)."""
    groups = _by_item(found, "accuracy")
    for number, (items, title, label) in enumerate(RESTRICTED_CHARTS, start=1):
        shown = {item: groups[item] for item in items if item in groups}
        if not shown:
            continue
        key = f"{name}-{number}"
        curves = [
            _accuracy_curve(rows, colour=RESTRICTED[item][1], dashed=RESTRICTED[item][2])
            for item, rows in shown.items()
        ]
        words = {item: RESTRICTED[item][0] for item in shown}
        alt = f"{model}, {title.lower()}: " + "; ".join(
            f"{words[item]}, {measured_percent(rows[0].value or 0)}% at "
            f"{int(rows[0].level or 0)} and {measured_percent(rows[-1].value or 0)}% at "
            f"{int(rows[-1].level or 0)}"
            for item, rows in shown.items()
        )
        legend = tuple(
            LegendEntry(words[item], RESTRICTED[item][1], "dash" if RESTRICTED[item][2] else "line")
            for item in shown
        )
        rows: list[tuple[Cell, ...]] = [
            (words[item], int(row.level or 0), _accuracy(row))
            for item, group in shown.items()
            for row in group
        ]
        columns = (Column("attention"), Column(label, "number"), Column("accuracy", "measured"))
        yield Chart(
            key,
            f"{model}: {title[0].lower()}{title[1:]}",
            level_curves(curves, label=label, reference=None, name=key, alt=alt),
            legend,
            _restricted_caption(shown),
            Table(key, columns, tuple(rows)),
        )


def _restricted_caption(shown: Mapping[str, Sequence[Measurement]]) -> tuple[str, ...]:
    flags = {flag for rows in shown.values() for row in rows for flag in row.flags}
    lines = ["Restricted at inference only. Bands: 95%."]
    if "spatial" in shown:
        lines.append("Tokens before the patches, such as the class token, see all and are seen.")
    if "no_prefix_token" in flags:
        lines.append("Blocks without such tokens: a patch always sees itself, also in the control.")
    return tuple(lines)


def gap_chart(
    edges: Sequence[float],
    shares: Mapping[str, Sequence[float]],
    *,
    limits: tuple[float, float],
    title: str,
    name: str,
) -> Chart:
    """Histograms of states `clean/before/blocks.0.attn`, one panel per module."""
    modules = list(dict.fromkeys(key.split("/", 2)[2] for key in shares))
    states = [state for state in STATES if any(key.startswith("/".join(state)) for key in shares)]
    rows = [
        (
            module,
            [
                Density(tuple(shares[key]), STATES[state][1], STATES[state][2])
                for state in states
                if (key := "/".join((*state, module))) in shares
            ],
        )
        for module in modules
    ]
    legend = tuple(
        LegendEntry(STATES[state][0], STATES[state][1], "dash" if STATES[state][2] else "line")
        for state in states
    )
    table: list[tuple[Cell, ...]] = [
        (*key.split("/", 2), float(edges[place]), float(edges[place + 1]), float(share))
        for key, values in shares.items()
        for place, share in enumerate(values)
        if share > 0
    ]
    columns = tuple(Column(word) for word in ("images", "scaling", "module")) + tuple(
        Column(word, "number") for word in ("from", "to", "share of rows")
    )
    cancels, underflows = limits
    caption = (
        f"Dotted lines: beyond {cancels:g} the largest weight rounds to 1, beyond {underflows:g} "
        "the second underflows to 0, and softmax has no gradient.",
    )
    alt = f"{title}: gaps of {', '.join(modules)} in {len(states)} states."
    svg = density_rows(edges, rows, limits=limits, name=name, alt=alt)
    return Chart(name, title, svg, legend, caption, Table(name, columns, tuple(table)))


def semantics_table(found: Mapping[str, Sequence[Measurement]], *, name: str) -> Table:
    """Share of perturbations that a judge recognises: one row per model, judge and sign."""
    rows: list[tuple[Cell, ...]] = []
    for model, measurements in found.items():
        chance = next((m.value for m in measurements if m.item == "chance"), None)
        for row in measurements:
            if row.item == "chance":
                continue
            judge, _, sign = row.item.rpartition("/")
            shown = "x_adv - x" if sign == "plus" else "x - x_adv"
            rows.append((model, judge, shown, _accuracy(row), chance))
    columns = (
        *(Column(word) for word in ("perturbed model", "judge", "picture")),
        Column("recognised", "measured"),
        Column("chance", "number"),
    )
    return Table(name, columns, tuple(rows), title="Perturbations, classified alone")


def alignment_table(found: Mapping[str, Sequence[Measurement]], *, name: str) -> Table:
    """How far perturbations follow the patch grid: one row per model."""
    rows: list[tuple[Cell, ...]] = []
    for model, measurements in found.items():
        values = {m.metric: m for m in measurements if m.item == "patch_alignment"}
        if "score" in values:
            level = values["score"].level
            numbers = [values[key].value for key in ("score", "rank", "z")]
            rows.append((model, level and int(level), *numbers))
    titles = ("patch, pixels", "score", "rank among shifted grids", "z-score")
    columns = (Column("model"), *(Column(word, "number") for word in titles))
    return Table(name, columns, tuple(rows), title="Alignment with the patch grid: 1 is none")


def _by_item(found: Sequence[Measurement], metric: str) -> dict[str, list[Measurement]]:
    """Rows with a level and a value by item, sorted by level."""
    groups: dict[str, list[Measurement]] = {}
    for row in found:
        if row.metric == metric and row.level is not None and row.value is not None:
            groups.setdefault(row.item, []).append(row)
    return {item: sorted(rows, key=lambda row: row.level or 0.0) for item, rows in groups.items()}


def _accuracy_curve(rows: Sequence[Measurement], *, colour: str, dashed: bool) -> Curve:
    shares = [_accuracy(row) for row in rows]
    return Curve(
        tuple(row.level or 0.0 for row in rows),
        tuple(share.value for share in shares),
        tuple(share.low for share in shares),
        tuple(share.high for share in shares),
        colour,
        dashed,
    )


def _accuracy(row: Measurement) -> Accuracy:
    value = row.value or 0.0
    low, high = (value if end is None else end for end in (row.lo95, row.hi95))
    return Accuracy(value, low, high, row.n or 0)
