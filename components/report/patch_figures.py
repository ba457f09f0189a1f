"""Charts of patch certificates as inline SVG: by patch side, by ablation size and by stride."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.ticker import MaxNLocator

from components.report.content import Accuracy, ResultKind
from components.report.figures import add_value, interval_point, new_figure, percent_axis, to_svg
from components.report.palette import ATTACKED, MEASURED, MUTED, PROVEN

MARKERS = ("o", "s", "^", "D", "v", "P")  # distinguishable without colour; more lines are not drawn
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1, 1, 1)), "-", (0, (5, 2)))


@dataclass(frozen=True, slots=True)
class Series:
    """One line: an accuracy at each of some sizes or strides."""

    label: str
    x: tuple[int, ...]
    y: tuple[Accuracy, ...]


def patch_curve(
    sizes: Sequence[int],
    *,
    certified: Sequence[Accuracy],
    standard: Accuracy,
    attacked: tuple[float, Accuracy] | None,
    name: str,
    alt: str,
) -> str:
    """Certified accuracy by patch side; side 0 is the vote's accuracy without an adversary."""
    with new_figure(1, height=3.3) as (figure, (axes,)):
        shares = [100 * a.value for a in certified]
        axes.fill_between(
            sizes,
            [100 * a.low for a in certified],
            [100 * a.high for a in certified],
            color=PROVEN,
            alpha=0.16,
            linewidth=0,
        )
        axes.plot(sizes, shares, color=PROVEN, marker="o", markersize=5)
        for size, one in zip(sizes, certified, strict=True):
            add_value(axes, size, 100 * one.value, f"{size} px, certified: {one.words('proven')}")
        said = "without an adversary"
        interval_point(axes, 0, standard, colour=MEASURED, marker="o", said=said)
        axes.plot(
            [0, sizes[0]], [100 * standard.value, shares[0]], color=MUTED, lw=1, ls=(0, (2, 3))
        )
        if attacked:
            said = "after the attack"
            interval_point(axes, *attacked, colour=ATTACKED, marker="D", said=said)
        axes.set_xlabel("side of the square patch, pixels")
        axes.set_xlim(-0.35, max(sizes) + 0.35)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
        percent_axis(axes, "accuracy, % of items")
        return to_svg(figure, name=name, alt=alt)


def sweep_curves(
    certified: Sequence[Series],
    standard: Sequence[Series],
    *,
    sound: bool,
    label: str,
    name: str,
    alt: str,
) -> str:
    """Certified accuracy above standard accuracy; unsound figures have another colour."""
    if max(len(certified), len(standard)) > len(MARKERS):
        raise ValueError(f"at most {len(MARKERS)} lines can be drawn")
    with new_figure(2, height=5.2) as (figure, (upper, lower)):
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
        kind: ResultKind = "proven" if colour == PROVEN else "measured"
        add_value(axes, x, 100 * a.value, f"{series.label}, {x}: {a.words(kind)}")
