"""Error against model size, one panel per benchmark, and the page that shows it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from components.evaluate.across_runs import Benchmark
from components.evaluate.metrics import MetricRow
from components.evaluate.scaling import ScalingFit
from components.report.content import Cell, Chapter, Chart, Column, Content, Fact, Table
from components.report.evaluation import overview
from components.report.evaluation.chapters import Evaluation
from components.report.evaluation.signs import MAX_MODELS, ModelSign, sign_of
from components.report.figures import new_figure, to_svg

Panels = Mapping[Benchmark, Sequence[ScalingFit]]
NAME = "scaling"
COARSE, FINE = (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)  # ticks of a decade
APART = 0.12  # least distance of two slopes, as a share of the height of a panel
SMALLEST_ERROR = 1e-4  # that a logarithmic axis shows
INTRO = (
    "log10(error) = a + b log10(parameters in millions), by least squares, for each family of "
    "models and pre-training set (Bhojanapalli et al. 2021, Figs. 4 and 30). b is the slope: the "
    "more negative, the more a larger model helps. Intervals of b are those of linear regression, "
    "wide where models are few."
)


def scaling_chapter(panels: Panels) -> Chapter:
    """The chart of all benchmarks, the fits and the models behind them."""
    return Chapter(
        NAME, "Error against size", INTRO, charts=(_chart(panels),), tables=(_fits(panels),)
    )


def scaling_page(
    panels: Panels, rows: Sequence[MetricRow], *, title: str, provenance: Sequence[Fact]
) -> Content:
    """The page of `casemate scaling`: fits, then all models side by side."""
    found = Evaluation(tuple(rows))
    beside = overview.chapter(found.single())
    models = len({row.model for row in rows})
    return Content(
        title,
        f"{models} models, {len(panels)} benchmarks",
        (),
        Table("headline", (Column("Model"),), ()),  # the overview has all models
        (),
        (scaling_chapter(panels), *([beside] if beside else [])),
        "",
        tuple(provenance),
    )


def groups_of(panels: Panels) -> list[str]:
    """The families and pre-training sets of all panels."""
    return list(dict.fromkeys(_group(fit) for fits in panels.values() for fit in fits))


def _group(fit: ScalingFit) -> str:
    return f"{fit.family}, {fit.pretrain}" if fit.pretrain else fit.family


def _chart(panels: Panels) -> Chart:
    shown = groups_of(panels)[:MAX_MODELS]
    signs = {group: sign_of(number) for number, group in enumerate(shown)}
    hidden = len(groups_of(panels)) - len(shown)
    return Chart(
        NAME,
        "Error by number of parameters",
        log_log(panels, signs, alt=f"Error against parameters. {' '.join(_sentences(panels))}"),
        tuple(sign.legend(group) for group, sign in signs.items()),
        (
            "Both axes are logarithmic; vertical lines are 95% intervals over items; numbers on "
            "the right are the slopes of the lines.",
            *_sentences(panels),
            *([f"{hidden} more families are in the table only."] if hidden else []),
        ),
        _points(panels),
    )


def _sentences(panels: Panels) -> Iterator[str]:
    for benchmark, fits in panels.items():
        said = "; ".join(f"{_group(fit)} {_slope_words(fit)}" for fit in fits)
        yield f"{benchmark.title}: {said}."


def _slope_words(fit: ScalingFit) -> str:
    if fit.slope is None or fit.slope_interval is None:
        return f"no line ({fit.why_not})"
    low, high = fit.slope_interval
    return f"slope {fit.slope:.3f} (95% {low:.3f} to {high:.3f})"


def log_log(panels: Panels, signs: Mapping[str, ModelSign], *, alt: str) -> str:
    """One panel per benchmark: a point per model, a line per fitted group."""
    points = [p for fits in panels.values() for fit in fits for p in fit.points]
    sizes = [point.params_m for point in points]
    height, style = 0.6 + 2.3 * len(panels), {"axes.titlesize": 11}
    with new_figure(len(panels), height=height, style=style) as (figure, all_axes):
        for axes, (benchmark, fits) in zip(all_axes, panels.items(), strict=True):
            axes.set_title(benchmark.title, loc="left")
            axes.set_xscale("log")
            axes.set_yscale("log")
            for fit in fits:
                if _group(fit) in signs:
                    _draw(axes, fit, signs[_group(fit)])
            _log_axis(axes.yaxis, [100 * p.error for fit in fits for p in fit.points])
            _write_slopes(axes, fits, signs)
            axes.set_ylabel("error, %")
        _log_axis(all_axes[-1].xaxis, sizes)
        all_axes[-1].set_xlim(0.8 * min(sizes), 1.25 * max(sizes))
        all_axes[-1].set_xlabel("parameters, millions")
        figure.align_ylabels()
        return to_svg(figure, name=NAME, alt=alt)


def _draw(axes: Any, fit: ScalingFit, sign: ModelSign) -> None:
    for point in fit.points:
        if point.interval and point.error > 0:
            ends = [100 * max(end, SMALLEST_ERROR) for end in point.interval]
            axes.plot([point.params_m] * 2, ends, color=sign.colour, linewidth=1.2, alpha=0.6)
    drawn = [point for point in fit.points if point.error > 0]
    axes.plot(
        [point.params_m for point in drawn],
        [100 * point.error for point in drawn],
        color=sign.colour,
        marker=sign.marker,
        markersize=6,
        linestyle="none",
    )
    if fit.slope is None or fit.intercept is None:
        return
    sizes = np.array([fit.points[0].params_m, fit.points[-1].params_m])
    fitted = 100 * 10 ** (fit.intercept + fit.slope * np.log10(sizes))
    axes.plot(sizes, fitted, color=sign.colour, linestyle=sign.line, linewidth=1.4)


def _write_slopes(axes: Any, fits: Sequence[ScalingFit], signs: Mapping[str, ModelSign]) -> None:
    """The slope of every line in the right margin, near its end and apart from the others."""
    low, high = np.log10(axes.get_ylim())
    places = {}
    for fit in fits:
        if fit.slope is not None and fit.intercept is not None and _group(fit) in signs:
            end = fit.intercept + fit.slope * np.log10(fit.points[-1].params_m) + 2  # in percent
            places[_group(fit)] = (float((end - low) / (high - low)), fit.slope)
    last = -1.0
    for group, (place, slope) in sorted(places.items(), key=lambda pair: (pair[1], pair[0])):
        last = max(place, last + APART)
        axes.text(
            1.02,
            last,
            f"{slope:.3f}",
            transform=axes.transAxes,
            va="center",
            color=signs[group].colour,
        )


def _log_axis(axis: Any, values: Sequence[float]) -> None:
    """Ticks in plain numbers; more of them where values are close to each other."""
    positive = [value for value in values if value > 0] or [1.0]
    steps = COARSE if max(positive) > 8 * min(positive) else FINE
    low, high = np.floor(np.log10(min(positive))), np.ceil(np.log10(max(positive)))
    decades = range(int(low), int(high) + 1)
    axis.set_major_locator(FixedLocator([step * 10.0**d for d in decades for step in steps]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _points(panels: Panels) -> Table:
    columns = (
        *(Column("Benchmark"), Column("Family"), Column("pre-training"), Column("Model")),
        *(Column("parameters", "number", "millions"), Column("error", "number", "%")),
        *(Column("at least", "number", "95%"), Column("at most", "number", "95%")),
        Column("n", "number"),
    )
    cells: list[tuple[Cell, ...]] = []
    for benchmark, fits in panels.items():
        for fit in fits:
            for point in fit.points:
                ends = [100 * end for end in point.interval] if point.interval else [None, None]
                about = (benchmark.title, fit.family, fit.pretrain, point.model)
                cells.append((*about, point.params_m, 100 * point.error, *ends, point.n))
    return Table(f"{NAME}.models", columns, tuple(cells))


def _fits(panels: Panels) -> Table:
    columns = (
        *(
            Column("Benchmark"),
            Column("Family"),
            Column("pre-training"),
            Column("models", "number"),
        ),
        *(Column("slope b", "number"), Column("at least", "number", "95%")),
        *(Column("at most", "number", "95%"), Column("intercept a", "number")),
        Column("Note", "note"),
    )
    cells: list[tuple[Cell, ...]] = []
    for benchmark, fits in panels.items():
        for fit in fits:
            ends = fit.slope_interval or (None, None)
            about = (benchmark.title, fit.family, fit.pretrain, len(fit.points))
            cells.append((*about, fit.slope, *ends, fit.intercept, fit.why_not or ""))
    return Table(NAME, columns, tuple(cells), title="Fitted lines")
