"""Accuracy by ablation size or stride as inline SVG: certified above, standard below."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.ticker import MaxNLocator

from components.report.content import Accuracy
from components.report.figures import new_figure, percent_axis, to_svg
from components.report.palette import MEASURED, PROVEN, STYLE

MARKERS = ("o", "s", "^", "D", "v", "P")  # distinguishable without colour; more lines are not drawn
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1, 1, 1)), "-", (0, (5, 2)))


@dataclass(frozen=True, slots=True)
class Series:
    """One line: an accuracy at each of some sizes or strides."""

    label: str
    x: tuple[int, ...]
    y: tuple[Accuracy, ...]


def sweep_curves(
    certified: Sequence[Series],
    standard: Sequence[Series],
    *,
    sound: bool,
    label: str,
    name: str,
    alt: str,
) -> str:
    """Two panels over one axis; unsound figures are not drawn in the colour of proofs."""
    if max(len(certified), len(standard)) > len(MARKERS):
        raise ValueError(f"at most {len(MARKERS)} lines can be drawn")
    with mpl.rc_context(STYLE):
        figure, (upper, lower) = new_figure(2, height=5.2)
        for axes, lines, colour in (
            (upper, certified, PROVEN if sound else MEASURED),
            (lower, standard, MEASURED),
        ):
            for number, series in enumerate(lines):
                _draw(axes, series, number, colour=colour)
            if len(lines) > 1:
                axes.legend(frameon=False, fontsize=9, loc="best")
        percent_axis(upper, "certified, %" if sound else "not sound, %")
        percent_axis(lower, "standard, %")
        lower.set_xlabel(label)
        lower.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
        return to_svg(figure, name=name, alt=alt)


def _draw(axes: Any, series: Series, number: int, *, colour: str) -> None:
    values = [100 * a.value for a in series.y]
    axes.plot(
        series.x,
        values,
        color=colour,
        marker=MARKERS[number],
        markersize=5,
        linestyle=DASHES[number],
        linewidth=1.6,
        label=series.label,
    )
    for x, a in zip(series.x, series.y, strict=True):
        axes.plot([x, x], [100 * a.low, 100 * a.high], color=colour, linewidth=1, alpha=0.6)
