"""Charts that compare l2 certificates, in the style of `figures`."""

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib as mpl
import numpy as np

from components.core.types import FloatArray, IntArray
from components.report.figures import new_figure, percent_axis, to_svg
from components.report.palette import INK, MUTED, PROVEN, STYLE

DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))  # one per curve


@dataclass(frozen=True, slots=True)
class RadiusLine:
    """A certified curve: `share[i]` holds on the interval that ends at `radii[i]`, 0 beyond."""

    label: str
    radii: FloatArray
    share: FloatArray


def curves(
    lines: Sequence[RadiusLine],
    *,
    others: Sequence[RadiusLine],
    with_envelope: bool,
    name: str,
    alt: str,
) -> str:
    """Certified accuracy by l2 radius of several certificates; each line is named at its end."""
    with mpl.rc_context(STYLE):
        figure, (axes,) = new_figure(1, height=3.6)
        right = 1.25 * max(1e-3, *(float(line.radii[-1]) for line in (*lines, *others)))
        if with_envelope:
            _draw(axes, envelope_line(lines), right, color=INK, linewidth=6, alpha=0.18)
        for colour, group in ((PROVEN, lines), (MUTED, others)):
            for number, line in enumerate(group):
                dashes = DASHES[number % len(DASHES)] if group is lines else (0, (3, 2))
                _draw(axes, line, right, color=colour, linestyle=dashes, linewidth=1.6)
                axes.annotate(
                    line.label,
                    (float(line.radii[-1]), 100 * float(line.share[-1])),
                    xytext=(4, 3),
                    textcoords="offset points",
                    color=colour,
                    fontsize=9,
                )
        axes.set_xlabel("l2 radius, pixels in [0, 1]")
        axes.set_xlim(-0.02 * right, right)
        percent_axis(axes, "certified accuracy, % of items")
        return to_svg(figure, name=name, alt=alt)


def envelope_line(lines: Sequence[RadiusLine]) -> RadiusLine:
    """The highest line at each radius."""
    knots = np.unique(np.concatenate([line.radii for line in lines]))
    shares = [np.append(line.share, 0.0)[np.searchsorted(line.radii, knots)] for line in lines]
    return RadiusLine("envelope", knots, np.max(shares, axis=0))


def _draw(axes: object, line: RadiusLine, right: float, **style: object) -> None:
    x = np.concatenate([[0.0], line.radii, [line.radii[-1], right]])
    y = 100 * np.concatenate([line.share[:1], line.share, [0, 0]])  # nothing is proven beyond
    axes.step(x, y, where="pre", **style)  # type: ignore[attr-defined]


def bound_bars(edges: FloatArray, counts: IntArray, *, name: str, alt: str) -> str:
    """Items by the lower bound of their class probability."""
    with mpl.rc_context(STYLE):
        figure, (axes,) = new_figure(1, height=2.6)
        axes.bar(edges[:-1], counts, width=np.diff(edges) * 0.92, align="edge", color=PROVEN)
        axes.axvline(0.5, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.set_xlim(0, 1)
        axes.set_xlabel("lower bound of the class probability")
        axes.set_ylabel("items")
        return to_svg(figure, name=name, alt=alt)
