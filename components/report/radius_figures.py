"""Charts of l2 certificates as inline SVG."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from components.core.types import FloatArray, IntArray
from components.report.content import Accuracy
from components.report.evaluation.signs import ModelSign
from components.report.figures import add_value, interval_point, new_figure, percent_axis, to_svg
from components.report.palette import ATTACKED, INK, MEASURED, MUTED, PAPER, PROVEN

DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))  # one per curve


@dataclass(frozen=True, slots=True)
class RadiusLine:
    """A certified curve: `share[i]` holds on the interval that ends at `radii[i]`, 0 beyond."""

    label: str
    radii: FloatArray
    share: FloatArray


def radius_curve(
    radii: FloatArray,
    *,
    share: FloatArray,
    low: FloatArray,
    high: FloatArray,
    cap: float | None,
    attacked: tuple[float, Accuracy] | None,
    standard: Accuracy,
    claimed: Sequence[tuple[float, Accuracy]] = (),
    name: str,
    alt: str,
) -> str:
    """Certified accuracy by l2 radius: `share[i]` holds on the interval that ends at `radii[i]`."""
    with new_figure(1, height=3.3) as (figure, (axes,)):
        ends = [float(radii[-1]), cap or 0.0, attacked[0] if attacked else 0.0]
        right = 1.08 * max(max(ends), 1e-3)
        x = np.concatenate([[0.0], radii, [radii[-1], right]])
        # beyond the largest radius nothing is proven: the last two knots are zero
        y, below, above = (100 * np.concatenate([v[:1], v, [0, 0]]) for v in (share, low, high))
        axes.fill_between(x, below, above, step="pre", color=PROVEN, alpha=0.16, linewidth=0)
        axes.step(x, y, where="pre", color=PROVEN)
        if cap is not None:
            axes.axvline(cap, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)))
        for radius, one in claimed:
            said = f"radius {radius:g}, certified: {one.words('proven')}"
            add_value(axes, radius, 100 * one.value, said)
        said = "without an adversary"
        interval_point(axes, 0, standard, colour=MEASURED, marker="o", said=said)
        if attacked:
            said = "after the attack"
            interval_point(axes, *attacked, colour=ATTACKED, marker="D", said=said)
        _radius_axis(axes, right)
        percent_axis(axes, "accuracy, % of items")
        return to_svg(figure, name=name, alt=alt)


def curves(
    lines: Sequence[RadiusLine],
    *,
    others: Sequence[RadiusLine],
    with_envelope: bool,
    name: str,
    alt: str,
) -> str:
    """Certified accuracy by l2 radius of several certificates; each line is named at its end."""
    with new_figure(1, height=3.6) as (figure, (axes,)):
        right = 1.25 * max(1e-3, *(float(line.radii[-1]) for line in (*lines, *others)))
        if with_envelope:
            _draw(axes, envelope_line(lines), right, color=INK, linewidth=6, alpha=0.18)
        for colour, group in ((PROVEN, lines), (MUTED, others)):
            for number, line in enumerate(group):
                dashes = DASHES[number % len(DASHES)] if group is lines else (0, (3, 2))
                _draw(axes, line, right, color=colour, linestyle=dashes, linewidth=1.6)
        _name_ends(axes, (*lines, *others), num_own=len(lines))
        _radius_axis(axes, right)
        percent_axis(axes, "certified accuracy, % of items")
        return to_svg(figure, name=name, alt=alt)


def _name_ends(axes: Any, lines: Sequence[RadiusLine], *, num_own: int) -> None:
    """The name of each line at its end, above the names that are there and in front of lines."""
    lowest = 2.0
    ends = sorted(range(len(lines)), key=lambda i: float(lines[i].share[-1]))
    for i in ends:
        place = max(lowest, 100 * float(lines[i].share[-1]) + 1)
        lowest = place + 6.5
        axes.annotate(
            lines[i].label,
            (float(lines[i].radii[-1]), place),
            xytext=(4, 0),
            textcoords="offset points",
            color=PROVEN if i < num_own else MUTED,
            fontsize=9,
            bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1, "alpha": 0.9},
            zorder=8,
        )


def signed_curves(lines: Sequence[tuple[RadiusLine, ModelSign]], *, name: str, alt: str) -> str:
    """Certified accuracy by l2 radius of several models, each with its own colour and dashes."""
    with new_figure(1, height=3.3) as (figure, (axes,)):
        right = 1.08 * max(1e-3, *(float(line.radii[-1]) for line, _ in lines))
        for line, sign in lines:
            _draw(axes, line, right, color=sign.colour, linestyle=sign.line, linewidth=1.8)
        _radius_axis(axes, right)
        percent_axis(axes, "certified accuracy, % of items")
        return to_svg(figure, name=name, alt=alt)


def _radius_axis(axes: Any, right: float) -> None:
    axes.set_xlabel("l2 radius, pixels in [0, 1]")
    axes.set_xlim(-0.02 * right, right)


def envelope_line(lines: Sequence[RadiusLine]) -> RadiusLine:
    """The highest line at each radius."""
    knots = np.unique(np.concatenate([line.radii for line in lines]))
    shares = [np.append(line.share, 0.0)[np.searchsorted(line.radii, knots)] for line in lines]
    return RadiusLine("envelope", knots, np.max(shares, axis=0))


def _draw(axes: Any, line: RadiusLine, right: float, **style: object) -> None:
    x = np.concatenate([[0.0], line.radii, [line.radii[-1], right]])
    y = 100 * np.concatenate([line.share[:1], line.share, [0, 0]])  # nothing is proven beyond
    axes.step(x, y, where="pre", **style)


def bound_bars(edges: FloatArray, counts: IntArray, *, name: str, alt: str) -> str:
    """Items by the lower bound of their class probability."""
    with new_figure(1, height=2.6) as (figure, (axes,)):
        axes.bar(edges[:-1], counts, width=np.diff(edges) * 0.92, align="edge", color=PROVEN)
        for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
            if count:
                said = f"bound {low:.3g} to {high:.3g}: {int(count)} items"
                add_value(axes, float((low + high) / 2), float(count), said)
        axes.axvline(0.5, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.set_xlim(0, 1)
        axes.set_xlabel("lower bound of the class probability")
        axes.set_ylabel("items")
        return to_svg(figure, name=name, alt=alt)


def certified_steps(
    radii: FloatArray, *, num_items: int, max_steps: int = 400
) -> tuple[FloatArray, FloatArray]:
    """(radius, share) knots of r -> share of items with a radius of at least r.

    `radii` are those of the correctly classified, certified items. Of more distinct radii than
    `max_steps` some are left out; the line then runs on or below the exact one, never above.
    """
    knots = np.unique(radii)
    if len(knots) == 0:
        return np.zeros(1), np.zeros(1)
    if len(knots) > max_steps:
        knots = knots[np.unique(np.linspace(0, len(knots) - 1, max_steps).round().astype(int))]
    held = len(radii) - np.searchsorted(np.sort(radii), knots, side="left")
    return knots, held / num_items
