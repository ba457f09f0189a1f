"""Charts as deterministic inline SVG; colours are CSS variables of the page, for dark mode.

Colours are drawn as fixed stand-ins and then replaced by CSS variables. Text stays text (small and
selectable), and is never parsed as mathematics, because labels may be names that a user chose.
"""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from components.core.shares import measured_percent
from components.report.content import Accuracy, ResultKind
from components.report.palette import ATTACKED, COLOURS, INK, MEASURED, PAPER, STYLE

VALUE = "value:"  # ids of drawn parts that show their value to a pointer
WIDTH = 5.0  # inches = 360 pt: about one pixel per point on a phone, so 11 pt text stays legible


def attack_bars(
    models: Sequence[str],
    *,
    clean: Sequence[Accuracy],
    attacked: Sequence[Accuracy],
    name: str,
    alt: str,
) -> str:
    """Clean and attacked accuracy of each model, with intervals."""
    with new_figure(1, height=0.9 + 0.72 * len(models)) as (figure, (axes,)):
        kinds: tuple[ResultKind, ResultKind] = ("measured", "attacked")
        parts = zip((-0.19, 0.19), (clean, attacked), (MEASURED, ATTACKED), kinds, strict=True)
        for offset, rows, colour, kind in parts:
            places = [i + offset for i in range(len(models))]
            axes.barh(places, [100 * a.value for a in rows], height=0.34, color=colour)
            for model, place, row in zip(models, places, rows, strict=True):
                axes.plot([100 * row.low, 100 * row.high], [place] * 2, color=INK, linewidth=1.2)
                said = {"measured": "clean", "attacked": "after the attacks"}[kind]
                add_value(axes, 100 * row.value, place, f"{model}, {said}: {row.words(kind)}")
                axes.text(103, place, measured_percent(row.value), va="center", ha="left")
        axes.set_yticks(range(len(models)), [_short(model) for model in models])
        axes.set_ylim(len(models) - 0.45, -0.55)  # first model on top
        axes.set_xlim(0, 100)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("accuracy, % of items")
        return to_svg(figure, name=name, alt=alt)


def training_curves(rows: Sequence[Mapping[str, Any]], *, name: str, alt: str) -> str:
    """Loss, accuracies, a denoiser's error and epsilon by epoch; empty panels are left out."""
    panels: list[tuple[str, list[tuple[str, str, Any]]]] = [
        ("loss", [("loss", INK, "-")]),
        (
            "accuracy, %",
            [
                ("train_accuracy", MEASURED, (0, (4, 2))),
                ("val_accuracy", INK, "-"),
                ("val_robust_accuracy", ATTACKED, "-"),
            ],
        ),
        ("squared error", [("val_mse", INK, "-")]),
        ("epsilon, /255", [("eps", INK, "-")]),
    ]
    shown = [
        (title, series) for title, series in panels if any(_points(rows, key) for key, *_ in series)
    ]
    if not shown:
        raise ValueError("training history holds no series to draw")
    with new_figure(len(shown), height=0.7 + 1.45 * len(shown)) as (figure, all_axes):
        for axes, (title, series) in zip(all_axes, shown, strict=True):
            factor = {"accuracy, %": 100, "epsilon, /255": 255}.get(title, 1)
            for key, colour, dashes in series:
                if points := _points(rows, key):
                    x, y = zip(*points, strict=True)
                    axes.plot(
                        x,
                        [factor * v for v in y],
                        color=colour,
                        linestyle=dashes,
                        marker="o" if len(x) < 25 else None,
                        markersize=3.5,
                    )
                    for epoch, found in points:
                        percents = f"{measured_percent(found)}%"
                        value = percents if factor == 100 else f"{factor * found:.4g}"
                        add_value(axes, epoch, factor * found, f"epoch {epoch}, {key}: {value}")
            axes.set_ylabel(title)
            axes.yaxis.set_major_locator(MaxNLocator(4))
            if title == "accuracy, %":
                axes.set_ylim(0, 100)
            else:
                axes.set_ylim(0, 1.08 * axes.dataLim.y1 or None)
        all_axes[-1].set_xlabel("epoch")
        all_axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.align_ylabels()
        return to_svg(figure, name=name, alt=alt)


def _points(rows: Sequence[Mapping[str, Any]], key: str) -> list[tuple[int, float]]:
    return [(int(row["epoch"]), float(row[key])) for row in rows if row.get(key) is not None]


def _short(text: str, limit: int = 16) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def interval_point(
    axes: Any, x: float, accuracy: Accuracy, *, colour: str, marker: str, said: str
) -> None:
    """An accuracy with its interval at `x`; `said` names it to a pointer."""
    add_value(axes, x, 100 * accuracy.value, f"{said}: {accuracy.words('measured')}")
    axes.plot([x, x], [100 * accuracy.low, 100 * accuracy.high], color=colour, lw=1.6, zorder=4)
    axes.plot(
        [x],
        [100 * accuracy.value],
        color=colour,
        marker=marker,
        markersize=8,
        markeredgewidth=1.5,
        markeredgecolor=PAPER,
        linestyle="none",
        zorder=5,
        clip_on=False,
    )


def add_value(axes: Any, x: float, y: float, text: str) -> None:
    """An invisible mark that shows `text` to a pointer above it."""
    axes.plot(
        [x],
        [y],
        color=INK,
        alpha=0,
        linestyle="none",
        marker="o",
        markersize=13,
        markeredgewidth=0,
        zorder=9,
        clip_on=False,
        gid=VALUE + text,
    )


def percent_axis(axes: Any, label: str) -> None:
    axes.set_ylim(0, 100)
    axes.set_ylabel(label)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))


@contextmanager
def new_figure(
    num_panels: int, *, height: float, style: Mapping[str, Any] | None = None
) -> Iterator[tuple[Any, list[Any]]]:
    """A figure in the style of the page, and the axes of its panels, one below the other."""
    with mpl.rc_context({**STYLE, **(style or {})}):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        FigureCanvasSVG(figure)
        grid = figure.subplots(num_panels, 1, sharex=True, squeeze=False)
        yield figure, [row[0] for row in grid]


def to_svg(figure: Any, *, name: str, alt: str) -> str:
    """The drawing as an inline element: labelled, without ids that another chart could share."""
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name}):  # ids depend on the chart's name only
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(rf'<g id="{VALUE}([^"]*)"', r'<g class="value"><title>\1</title', text)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    view_box = re.search(r'viewBox="[^"]*"', text)
    assert view_box is not None
    head = f'<svg class="chart" {view_box[0]} role="img" aria-label="{escape(alt)}">'
    text = head + text[text.index(">") + 1 :]
    text = text.replace("xlink:href", "href")
    for variable, colour in COLOURS.items():
        text = re.sub(rf"(fill|stroke): {colour}\b", rf"\1: var(--{variable}, {colour})", text)
    return "\n".join(line.rstrip() for line in text.splitlines())
