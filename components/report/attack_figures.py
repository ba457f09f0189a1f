"""Charts of attacks: accuracy by budget or steps, histograms of attention gaps."""

from collections.abc import Callable, Mapping, Sequence

from components.report.content import Accuracy
from components.report.figures import add_value, new_figure, percent_axis, to_svg
from components.report.palette import ATTACKED, COLOURS, INK, MUTED
from components.report.wording import pixels

DASHES = (0, (4, 2))


def accuracy_curves(
    series: Mapping[str, Sequence[tuple[float, Accuracy]]],
    *,
    colours: Sequence[str],
    dashed: Sequence[bool],
    label: str,
    x_words: Callable[[float], str],
    logarithmic: bool,
    in_levels: bool,
    marked: float | None,
    name: str,
    alt: str,
) -> str:
    """One line per model with its intervals; `marked` is a highlighted budget.

    Budgets are drawn in levels of 255 where all of them are whole ones; `x_words` names a place.
    """
    grays = in_levels and all(
        x == 0 or "/" in pixels(x) for points in series.values() for x, _ in points
    )
    factor = 255 if grays else 1
    with new_figure(1, height=3.3) as (figure, (axes,)):
        for points, colour, dash in zip(series.values(), colours, dashed, strict=True):
            x = [factor * x for x, _ in points]
            shares = [share for _, share in points]
            low, high = ([100 * getattr(s, end) for s in shares] for end in ("low", "high"))
            drawn = COLOURS[colour]
            axes.fill_between(x, low, high, color=drawn, alpha=0.14, linewidth=0)
            axes.plot(
                x,
                [100 * s.value for s in shares],
                color=drawn,
                linestyle=DASHES if dash else "-",
                marker="o",
                markersize=4.5,
            )
        for model, points in series.items():
            for place, share in points:
                said = f"{model}, {x_words(place)}: {share.words('attacked')}"
                add_value(axes, factor * place, 100 * share.value, said)
        if marked is not None:
            axes.axvline(factor * marked, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)))
        if logarithmic:
            ticks = sorted({x for points in series.values() for x, _ in points})
            axes.set_xscale("log")
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.minorticks_off()
        else:
            axes.set_xlim(left=0)
        axes.set_xlabel("budget eps, k/255" if grays else label)
        percent_axis(axes, "accuracy, % of items")
        return to_svg(figure, name=name, alt=alt)


def gap_histogram(
    edges: Sequence[float],
    *,
    counts: Sequence[Sequence[int]],
    highlighted: int,
    limits: tuple[float, float],
    name: str,
    alt: str,
) -> str:
    """Share of attention rows by gap, one line per block; the outer two bins have no edge."""
    with new_figure(1, height=3.0) as (figure, (axes,)):
        order = [i for i in range(len(counts)) if i != highlighted] + [highlighted]
        for i in order:
            inner = counts[i][1:-1]
            shares = [100 * count / max(sum(counts[i]), 1) for count in inner]
            colour = ATTACKED if i == highlighted else MUTED
            width = 1.8 if i == highlighted else 0.8
            axes.stairs(shares, edges, color=colour, linewidth=width)
        shown = counts[highlighted]
        for low, high, count in zip(edges[:-1], edges[1:], shown[1:-1], strict=True):
            if count:
                share = 100 * count / sum(shown)
                said = f"lead {low:.3g} to {high:.3g}: {share:.3g}% of rows"
                add_value(axes, (low * high) ** 0.5, share, said)
        for limit in limits:
            axes.axvline(limit, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.set_xscale("log")
        decades = [10.0**power for power in range(-3, 4)]
        axes.set_xticks(decades, [f"{decade:g}" for decade in decades])  # text, not mathematics
        axes.minorticks_off()
        axes.set_xlim(decades[0], decades[-1])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("largest minus second attention logit")
        axes.set_ylabel("% of rows")
        return to_svg(figure, name=name, alt=alt)
