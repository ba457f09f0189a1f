"""Charts of the evaluation suites as inline SVG, in the style of `figures`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from components.core.shares import measured_percent
from components.report.content import Accuracy, ResultKind
from components.report.evaluation.heat_maps import short
from components.report.evaluation.signs import ModelSign
from components.report.figures import WIDTH, add_value, new_figure, percent_axis, to_svg
from components.report.palette import COLOURS, INK, MEASURED, MUTED, STYLE

GUIDE: Any = (0, (2, 3))


@dataclass(frozen=True, slots=True)
class Series:
    """The shares of one model or metric, one for each row of a chart, and how it is drawn."""

    shares: Sequence[Accuracy | None]
    sign: ModelSign


@dataclass(frozen=True, slots=True)
class Curve:
    """(x, share) of one model, and how it is drawn."""

    points: Sequence[tuple[float, Accuracy]]
    sign: ModelSign


def dots(
    labels: Sequence[str],
    series: Sequence[Series],
    *,
    means: Sequence[float | None] = (),
    x_label: str,
    name: str,
    alt: str,
) -> str:
    """One row per label and a dot with its interval per series; `means` are vertical lines."""
    height = 0.9 + len(labels) * max(0.28, 0.17 * len(series))
    with new_figure(1, height=height) as (figure, (axes,)):
        step = 0.8 / max(len(series), 1)
        for number, one in enumerate(series):
            offset = (number - (len(series) - 1) / 2) * step
            for place, share in enumerate(one.shares):
                if share is not None:
                    _dot(axes, share, place + offset, one.sign)
                    said = f"{labels[place]}: {share.words('measured')}"
                    add_value(axes, 100 * share.value, place + offset, said)
        for mean, one in zip(means, series, strict=False):
            if mean is not None:
                axes.axvline(100 * mean, color=one.sign.colour, linewidth=1.2, linestyle=GUIDE)
        axes.set_yticks(range(len(labels)), [short(label) for label in labels])
        axes.set_ylim(len(labels) - 0.45, -0.55)  # first row on top
        axes.set_xlim(0, 100)
        axes.tick_params(axis="y", length=0, pad=8)  # a sign at 0 reaches over the axis
        for edge in range(1, len(labels)):
            axes.axhline(edge - 0.5, color=COLOURS["grid"], linewidth=0.6)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(x_label)
        return to_svg(figure, name=name, alt=alt)


def _dot(axes: Any, share: Accuracy, place: float, sign: ModelSign) -> None:
    ends = [100 * share.low, 100 * share.high]
    axes.plot(ends, [place, place], color=sign.colour, linewidth=1.6)
    axes.plot(
        [100 * share.value],
        [place],
        color=sign.colour,
        marker=sign.marker,
        markersize=5.5,
        clip_on=False,
    )


def curves(series: Sequence[Curve], *, x_label: str, y_label: str, name: str, alt: str) -> str:
    """One line per model with its band of intervals."""
    with new_figure(1, height=3.2) as (figure, (axes,)):
        for curve in series:
            _curve(axes, curve, band=True)
        axes.set_xlabel(x_label)
        percent_axis(axes, y_label)
        return to_svg(figure, name=name, alt=alt)


def _curve(axes: Any, curve: Curve, *, band: bool) -> None:
    x = [place for place, _ in curve.points]
    low, high = ([100 * getattr(s, end) for _, s in curve.points] for end in ("low", "high"))
    if band:
        axes.fill_between(x, low, high, color=curve.sign.colour, alpha=0.14, linewidth=0)
    axes.plot(
        x,
        [100 * share.value for _, share in curve.points],
        color=curve.sign.colour,
        linestyle=curve.sign.line,
        marker=curve.sign.marker if len(x) < 12 else None,
        markersize=3.5,
        linewidth=1.6,
    )
    for place, share in curve.points:
        add_value(axes, place, 100 * share.value, f"{place:g}: {share.words('measured')}")


def small_multiples(
    panels: Sequence[tuple[str, Sequence[Curve]]],
    *,
    num_columns: int,
    x_label: str,
    name: str,
    alt: str,
) -> str:
    """One small panel per item with the lines of all models, all on the same axes."""
    titles = [short(title) for title, _ in panels]
    with _panels(titles, num_columns=num_columns, height=1.12, x_label=x_label) as (figure, grid):
        for axes, (_, series) in zip(grid, panels, strict=True):
            for curve in series:
                _curve(axes, curve, band=False)
            axes.set_ylim(0, 100)
            axes.yaxis.set_major_locator(MaxNLocator(2))
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
        return to_svg(figure, name=name, alt=alt)


@contextmanager
def _panels(
    titles: Sequence[str], *, num_columns: int, height: float, x_label: str
) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure of accuracies in rows of panels, all on the same axes."""
    num_rows = -(-len(titles) // num_columns)
    with mpl.rc_context({**STYLE, "axes.titlesize": 11}):
        figure = Figure(figsize=(WIDTH, 0.5 + height * num_rows), layout="constrained")
        grid = figure.subplots(num_rows, num_columns, sharex=True, sharey=True, squeeze=False)
        for axes in grid.flat[len(titles) :]:
            axes.set_visible(False)
        for place, title in enumerate(titles):
            grid.flat[place].set_title(title)
            if place + num_columns >= len(titles):  # the last panel of its column
                grid.flat[place].tick_params(labelbottom=True)
        figure.supxlabel(x_label, fontsize=11)
        figure.supylabel("accuracy, %", fontsize=11)
        yield figure, list(grid.flat[: len(titles)])


def reliability(
    bins: Sequence[tuple[float, Accuracy]],
    *,
    edges: Sequence[tuple[float, float, int]],
    name: str,
    alt: str,
) -> str:
    """Accuracy by mean confidence with intervals and the diagonal; below, the number of items.

    `edges` are (low, high, number of items) of all bins, also of the empty ones.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 4.4), layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
        upper.plot([0, 100], [0, 100], color=MUTED, linewidth=1.2, linestyle=GUIDE)
        for confidence, share in bins:
            ends = [100 * share.low, 100 * share.high]
            upper.plot([100 * confidence] * 2, ends, color=MEASURED, linewidth=1.6)
        upper.plot(
            [100 * confidence for confidence, _ in bins],
            [100 * share.value for _, share in bins],
            color=INK,
            marker="o",
            markersize=5,
            linewidth=1.2,
            clip_on=False,
        )
        for confidence, share in bins:
            said = f"confidence {measured_percent(confidence)}%: {share.words('measured')}"
            add_value(upper, 100 * confidence, 100 * share.value, said)
        percent_axis(upper, "accuracy, %")
        lower.bar(
            [100 * low for low, _, _ in edges],
            [count for _, _, count in edges],
            width=[96 * (high - low) for low, high, _ in edges],
            align="edge",
            color=MEASURED,
        )
        lower.set_ylabel("items")
        lower.yaxis.set_major_locator(MaxNLocator(2, integer=True))
        lower.set_xlim(0, 100)
        lower.set_xlabel("confidence, %")
        return to_svg(figure, name=name, alt=alt)


def share_bars(
    labels: Sequence[str],
    shares: Sequence[Accuracy],
    *,
    mean: float | None,
    kind: ResultKind,
    x_label: str,
    name: str,
    alt: str,
) -> str:
    """Horizontal bars with intervals and their numbers; `mean` is a vertical line."""
    with new_figure(1, height=0.9 + 0.3 * len(labels)) as (figure, (axes,)):
        axes.barh(
            range(len(labels)), [100 * s.value for s in shares], height=0.62, color=COLOURS[kind]
        )
        for place, one in enumerate(shares):
            axes.plot([100 * one.low, 100 * one.high], [place] * 2, color=INK, linewidth=1.2)
            axes.text(103, place, measured_percent(one.value), va="center", ha="left")
            add_value(axes, 100 * one.value, place, f"{labels[place]}: {one.words(kind)}")
        if mean is not None:
            axes.axvline(100 * mean, color=MUTED, linewidth=1.2, linestyle=GUIDE)
        axes.set_yticks(range(len(labels)), [short(label) for label in labels])
        axes.set_ylim(len(labels) - 0.45, -0.55)
        axes.set_xlim(0, 100)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(x_label)
        return to_svg(figure, name=name, alt=alt)


@dataclass(frozen=True, slots=True)
class Bubble:
    """One model: clean share, share on a benchmark, size of its dot in points."""

    x: float
    y: float
    size: float
    sign: ModelSign


def bubbles(
    panels: Sequence[tuple[str, Sequence[Bubble]]], *, x_label: str, name: str, alt: str
) -> str:
    """Benchmarks against clean accuracy, one panel each, with the line of equal accuracy."""
    titles = [short(title, 24) for title, _ in panels]
    columns = min(2, len(panels))
    with _panels(titles, num_columns=columns, height=2.1, x_label=x_label) as (figure, grid):
        for axes, (_, found) in zip(grid, panels, strict=True):
            axes.plot([0, 100], [0, 100], color=MUTED, linewidth=1.2, linestyle=GUIDE)
            for one in found:
                axes.plot(
                    [100 * one.x],
                    [100 * one.y],
                    color=one.sign.colour,
                    marker=one.sign.marker,
                    markersize=one.size,
                    alpha=0.85,
                )
            axes.set_xlim(0, 100)
            axes.set_ylim(0, 100)
            axes.xaxis.set_major_locator(MaxNLocator(4))
            axes.yaxis.set_major_locator(MaxNLocator(4))
        return to_svg(figure, name=name, alt=alt)
