"""Charts of analyses: heat maps, curves with bands, rows of histograms."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from components.core.types import FloatArray
from components.report.attack_figures import DASHES
from components.report.figures import WIDTH, new_figure, percent_axis, to_svg
from components.report.palette import COLOURS, INK, MUTED, PAPER, PROVEN
from components.report.wording import TIMES

MARGIN = 1.0  # inches beside a square heat map: labels and colour key
DENSE = 25  # more points than this have no markers


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of a chart; shares in [0, 1]."""

    levels: tuple[float, ...]
    values: tuple[float, ...]
    low: tuple[float, ...]  # of the band
    high: tuple[float, ...]
    colour: str  # name of a page colour
    dashed: bool = False
    errors: tuple[float, ...] | None = None  # half lengths of error bars


def heat_map(matrix: FloatArray, *, borders: Sequence[int], name: str, alt: str) -> str:
    """A square of shares from paper (0) to deep blue (1); undefined cells are crossed out.

    Cells are blue with the share as opacity, so the scale follows the page's colours in dark mode.
    """
    depth = len(matrix)
    with new_figure(1, height=WIDTH - MARGIN) as (figure, (axes,)):
        for i in range(depth):
            for j in range(depth):
                _cell(axes, j - 0.5, i - 0.5, float(matrix[i, j]))
        for border in borders:
            for draw in (axes.axhline, axes.axvline):
                draw(border - 0.5, color=INK, linewidth=0.9)
        axes.set_xlim(-0.5, depth - 0.5)
        axes.set_ylim(depth - 0.5, -0.5)  # the first block on top
        axes.set_aspect("equal")
        axes.grid(visible=False)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        axes.set_xlabel("block")
        axes.set_ylabel("block")
        _colour_key(axes)
        return to_svg(figure, name=name, alt=alt)


def _cell(axes: Any, x: float, y: float, share: float) -> None:
    if not np.isfinite(share):
        middle = (x + 0.5, y + 0.5)
        axes.text(*middle, TIMES, color=MUTED, ha="center", va="center")
        return
    opacity = round(min(max(share, 0.0), 1.0), 4)
    cell = Rectangle((x, y), 1, 1, facecolor=PROVEN, edgecolor=PAPER, linewidth=0.3, alpha=opacity)
    axes.add_patch(cell)


def _colour_key(axes: Any) -> None:
    key = axes.inset_axes((1.05, 0.2, 0.05, 0.6))
    for step in range(20):
        opacity = (step + 0.5) / 20
        low = step / 20
        key.add_patch(Rectangle((0, low), 1, 0.05, facecolor=PROVEN, linewidth=0, alpha=opacity))
    key.set_xlim(0, 1)
    key.set_ylim(0, 1)
    key.grid(visible=False)
    key.set_xticks([])
    key.set_yticks([0, 0.5, 1])
    key.yaxis.tick_right()
    for side in ("top", "right"):
        key.spines[side].set_visible(True)


def level_curves(
    curves: Sequence[Curve], *, label: str, reference: float | None, name: str, alt: str
) -> str:
    """Accuracy over a whole number, with bands and error bars; `reference` is a dashed level."""
    with new_figure(1, height=3.3) as (figure, (axes,)):
        if reference is not None:
            axes.axhline(100 * reference, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)))
        for curve in curves:
            colour = COLOURS[curve.colour]
            low, high = ([100 * v for v in ends] for ends in (curve.low, curve.high))
            axes.fill_between(curve.levels, low, high, color=colour, alpha=0.14, linewidth=0)
            axes.errorbar(
                curve.levels,
                [100 * value for value in curve.values],
                yerr=None if curve.errors is None else [100 * error for error in curve.errors],
                color=colour,
                linestyle=DASHES if curve.dashed else "-",
                marker="o" if len(curve.levels) < DENSE else None,
                markersize=4.5,
                elinewidth=1.2,
                capsize=2.5,
            )
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
        axes.set_xlabel(label)
        percent_axis(axes, "accuracy, % of items")
        return to_svg(figure, name=name, alt=alt)


@dataclass(frozen=True, slots=True)
class Density:
    """A histogram of one state: shares per bin."""

    shares: tuple[float, ...]
    colour: str
    dashed: bool = False


def _decades(edges: Sequence[float], states: Sequence[Density]) -> list[float]:
    """Powers of ten that hold every share: at least those from 1e-3 to 1e3."""
    used = [place for s in states for place, share in enumerate(s.shares) if share > 0]
    lowest, highest = (edges[min(used)], edges[max(used) + 1]) if used else (1.0, 1.0)
    first = min(-3, math.floor(math.log10(lowest) + 1e-9))
    last = max(3, math.ceil(math.log10(highest) - 1e-9))
    step = 1 if last - first <= 8 else 2
    return [
        10.0**power
        for power in range(last - step * math.ceil((last - first) / step), last + 1, step)
    ]


def density_rows(
    edges: Sequence[float],
    rows: Sequence[tuple[str, Sequence[Density]]],
    *,
    limits: tuple[float, float],
    name: str,
    alt: str,
) -> str:
    """One panel per attention module, one outline per state; vertical lines are softmax limits."""
    with new_figure(len(rows), height=0.7 + 1.45 * len(rows)) as (figure, panels):
        for axes, (title, states) in zip(panels, rows, strict=True):
            for state in states:
                shares = [100 * share for share in state.shares]
                style = DASHES if state.dashed else "-"
                colour = COLOURS[state.colour]
                axes.stairs(shares, edges, color=colour, linewidth=1.4, linestyle=style)
            for limit in limits:
                axes.axvline(limit, color=INK, linewidth=1.0, linestyle=(0, (1, 2)))
            axes.set_title(title, fontsize=11, loc="left")
            axes.set_ylim(bottom=0)
            axes.yaxis.set_major_locator(MaxNLocator(3))
            axes.set_ylabel("% of rows")
        last = panels[-1]
        last.set_xscale("log")
        decades = _decades(edges, [state for _, states in rows for state in states])
        last.set_xticks(decades, [f"{decade:g}" for decade in decades])  # text, not mathematics
        last.minorticks_off()
        last.set_xlim(decades[0], decades[-1])
        last.set_xlabel("largest minus second attention logit")
        return to_svg(figure, name=name, alt=alt)
