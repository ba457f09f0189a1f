"""Heat maps as inline SVG: the darker a cell, the more errors; every cell has its number."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.patches import Rectangle

from components.report.content import LegendEntry, ResultKind
from components.report.figures import VALUE, new_figure, to_svg
from components.report.palette import COLOURS, INK, MUTED, PAPER

DARKEST = 0.6  # opacity of an error of 1: numbers stay legible in both colour schemes
LOWEST = 2.0  # inches: room for the label of the y axis
LETTER = 0.085  # inches of a letter of the y axis's label
MAX_LABEL = 17  # characters of a row's label


def shade_legend(text: str, kind: ResultKind) -> LegendEntry:
    """What the shades of a map mean."""
    return LegendEntry(text, kind, "bar")


@dataclass(frozen=True, slots=True)
class HeatCell:
    """A cell: how dark it is, from 0 to 1, its number and a smaller second one."""

    shade: float
    text: str = ""
    below: str = ""


@dataclass(frozen=True, slots=True)
class HeatLayout:
    """Labels of a heat map, and the rows and columns before which a line separates groups."""

    rows: Sequence[str]
    columns: Sequence[str]
    x_label: str
    y_label: str = ""
    row_breaks: Sequence[int] = ()
    column_breaks: Sequence[int] = ()
    marked: tuple[int, int] | None = None  # a framed cell
    rotated: bool = False  # names of columns: names of classes are longer than numbers


def heat_map(
    cells: Sequence[Sequence[HeatCell | None]],
    layout: HeatLayout,
    *,
    kind: ResultKind,
    name: str,
    alt: str,
) -> str:
    """A table of shaded cells; None is a cell without a number."""
    num_rows, num_columns = len(layout.rows), len(layout.columns)
    two_lines = any(cell and cell.below for row in cells for cell in row)
    height = max(LOWEST, 0.75 + num_rows * (0.5 if two_lines else 0.27))
    with new_figure(1, height=height) as (figure, (axes,)):
        for y, row in enumerate(cells):
            for x, cell in enumerate(row):
                _draw(axes, x, y, cell, colour=COLOURS[kind])
                if cell:
                    place = f"{layout.rows[y]}, {layout.columns[x]}"
                    _add_value(axes, x, y, f"{place}: {cell.text or 0} {cell.below}".rstrip())
        for y in layout.row_breaks:
            axes.plot([-0.5, num_columns - 0.5], [y - 0.5] * 2, color=INK, linewidth=1.2)
        for x in layout.column_breaks:
            axes.plot([x - 0.5] * 2, [-0.5, num_rows - 0.5], color=INK, linewidth=1.2)
        if layout.marked:
            y, x = layout.marked
            frame = Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor=INK, linewidth=1.8)
            axes.add_patch(frame)
        turn = 90 if layout.rotated and max(map(len, layout.columns)) > 3 else 0
        names = [short(label) for label in layout.columns]
        axes.set_xticks(range(num_columns), names, rotation=turn)
        axes.set_yticks(range(num_rows), [short(label) for label in layout.rows])
        axes.set_xlim(-0.5, num_columns - 0.5)
        axes.set_ylim(num_rows - 0.5, -0.5)  # first row on top
        axes.tick_params(length=0)
        axes.grid(visible=False)
        for spine in axes.spines.values():
            spine.set_visible(False)
        axes.xaxis.tick_top()
        axes.xaxis.set_label_position("top")
        axes.set_xlabel(layout.x_label)
        axes.set_ylabel(_fitting(layout.y_label, height))
        return to_svg(figure, name=name, alt=alt)


def _fitting(key: str, height: float) -> str:
    """The label of the y axis; of a setting that is longer than the axis, its last part."""
    return key if len(key) * LETTER < height - 0.5 else key.rpartition(".")[2]


def short(text: str, limit: int = MAX_LABEL) -> str:
    """A label that fits beside the cells."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _add_value(axes: Any, x: int, y: int, text: str) -> None:
    """An invisible cell that shows `text` to a pointer above it."""
    place = (x - 0.5, y - 0.5)
    axes.add_patch(Rectangle(place, 1, 1, alpha=0, linewidth=0, zorder=9, gid=VALUE + text))


def _draw(axes: object, x: int, y: int, cell: HeatCell | None, *, colour: str) -> None:
    if cell is None:
        axes.text(x, y, "–", ha="center", va="center", color=MUTED)  # type: ignore[attr-defined]  # noqa: RUF001
        return
    axes.add_patch(  # type: ignore[attr-defined]
        Rectangle(
            (x - 0.5, y - 0.5),
            1,
            1,
            facecolor=colour,
            alpha=DARKEST * cell.shade,
            linewidth=0,
        )
    )
    axes.add_patch(  # type: ignore[attr-defined]
        Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor=PAPER, linewidth=1.5)
    )
    above = y - 0.17 if cell.below else y
    axes.text(x, above, cell.text, ha="center", va="center", color=INK)  # type: ignore[attr-defined]
    if cell.below:
        axes.text(x, y + 0.22, cell.below, ha="center", va="center", color=INK)  # type: ignore[attr-defined]
