"""Charts about tuning: all trials across all keys, scores by one key, steps of an ablation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log10
from typing import Any

from components.report.content import Accuracy, ResultKind
from components.report.figures import new_figure, percent_axis, to_svg
from components.report.palette import COLOURS, INK, MEASURED, MUTED, PAPER
from components.report.records import TunedTrial
from components.report.wording import settings_text

DASHES = (0, (4, 2))
LABEL = 18  # characters of a value's label


@dataclass(frozen=True, slots=True)
class PlotAxis:
    """A key with the place of every trial on it, from 0 to 1, and labels at some places."""

    key: str
    places: tuple[float, ...]
    ticks: tuple[tuple[float, str], ...]


@dataclass(frozen=True, slots=True)
class ScoredTrials:
    """Scores of the drawn trials, the best one first."""

    scores: Sequence[Accuracy]
    finished: Sequence[bool]
    label: str  # of the score
    colour: ResultKind


def axis_of(key: str, space: Any, trials: Sequence[TunedTrial]) -> PlotAxis:
    """Listed values at equal distances; numbers of a distribution where they lie."""
    values = [trial.values[key] for trial in trials]
    if isinstance(space, list):
        last = max(len(space) - 1, 1)
        places = tuple(space.index(value) / last for value in values)
        ticks = tuple((i / last, label) for i, label in enumerate(value_labels(space)))
        return PlotAxis(key, places, ticks)
    low, high = float(space["low"]), float(space["high"])
    logarithmic = space["kind"] == "loguniform"

    def place(value: float) -> float:
        if logarithmic:
            return (log10(value) - log10(low)) / (log10(high) - log10(low))
        return (value - low) / (high - low)

    middle = (low * high) ** 0.5 if logarithmic else (low + high) / 2
    ticks = tuple((place(value), f"{value:.3g}") for value in (low, middle, high))
    return PlotAxis(key, tuple(place(float(value)) for value in values), ticks)


def value_labels(values: Sequence[Any]) -> list[str]:
    """A short label for each value; a section is labelled by its kind, or by how it differs."""
    labels = [_label(value) for value in values]
    if len(set(labels)) < len(labels):
        sections = [value for value in values if isinstance(value, Mapping)]
        shared = {
            key
            for key in (sections[0] if sections else {})
            if all(key in s and s[key] == sections[0][key] for s in sections)
        }
        labels = [
            _cut(settings_text({k: v for k, v in value.items() if k not in shared}) or "as it is")
            if isinstance(value, Mapping)
            else label
            for value, label in zip(values, labels, strict=True)
        ]
    if len(set(labels)) < len(labels):  # long texts that begin alike
        labels = [f"{i + 1}: {label}"[:LABEL] for i, label in enumerate(labels)]
    return labels


def _label(value: Any) -> str:
    if isinstance(value, Mapping):
        return _cut(str(value["kind"]) if "kind" in value else settings_text(value))
    if value is None or isinstance(value, bool):
        return {None: "none", True: "on", False: "off"}[value]
    return f"{value:g}" if isinstance(value, float) else _cut(str(value))


def _cut(text: str) -> str:
    return text if len(text) <= LABEL else text[: LABEL - 1] + "…"


def parallel_coordinates(
    axes: Sequence[PlotAxis], trials: ScoredTrials, *, name: str, alt: str
) -> str:
    """Every trial as a line from key to key and down to its score; the first one is highlighted.

    Keys are rows, not columns: a phone is narrow, and names of keys are long.
    """
    scores = trials.scores
    low, high = min(s.value for s in scores), max(s.value for s in scores)
    span = (high - low) or 1.0
    places = tuple((s.value - low) / span for s in scores)
    ends = [(0.0, f"{100 * low:.1f}"), (1.0, f"{100 * high:.1f}")][: 2 if high > low else 1]
    rows = [*axes, PlotAxis(trials.label, places, tuple(ends))]
    with new_figure(1, height=0.3 + 0.85 * len(rows)) as (figure, (plot,)):
        box = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.5}  # lines pass behind the text
        texts: dict[str, Any] = {"fontsize": 9, "zorder": 8, "bbox": box}
        for y, row in enumerate(rows):
            plot.plot([0, 1], [y, y], color=MUTED, linewidth=0.8)
            plot.text(-0.02, y - 0.14, row.key, ha="left", va="bottom", color=MUTED, **texts)
            for x, label in row.ticks:
                plot.plot([x, x], [y - 0.05, y + 0.05], color=INK, linewidth=1)
                plot.text(x, y + 0.1, label, ha=_beside(x), va="top", **texts)
        for i in reversed(range(len(scores))):  # the best one last, on top
            plot.plot(
                [row.places[i] for row in rows],
                range(len(rows)),
                color=MUTED if i else COLOURS[trials.colour],
                alpha=0.55 if i else 1.0,
                linewidth=1.0 if i else 2.4,
                linestyle="-" if trials.finished[i] else DASHES,
            )
        plot.set_xlim(-0.04, 1.04)
        plot.set_ylim(len(rows) - 0.5, -0.6)  # first key on top
        plot.axis("off")
        return to_svg(figure, name=name, alt=alt)


def _beside(x: float) -> str:
    """Labels at the ends grow inwards."""
    return "left" if x < 0.1 else "right" if x > 0.9 else "center"


def scores_by_value(axis: PlotAxis, trials: ScoredTrials, *, name: str, alt: str) -> str:
    """Every trial's score with its interval, above its value of one key."""
    with new_figure(1, height=3.0) as (figure, (plot,)):
        shown = zip(_spread(axis.places), trials.scores, trials.finished, strict=True)
        for x, score, whole in shown:
            drawn = COLOURS[trials.colour] if whole else MUTED
            ends = [100 * score.low, 100 * score.high]
            plot.plot([x, x], ends, color=drawn, linewidth=1.2, alpha=0.5)
            plot.plot([x], [100 * score.value], color=drawn, marker="o", markersize=5)
        plot.set_xlim(-0.12, 1.12)
        places, labels = zip(*axis.ticks, strict=True)
        crowded = sum(len(label) for label in labels) > 42
        plot.set_xticks(
            places, labels, rotation=35 if crowded else 0, ha="right" if crowded else "center"
        )
        plot.set_xlabel(axis.key)
        percent_axis(plot, trials.label)
        return to_svg(figure, name=name, alt=alt)


def _spread(places: Sequence[float]) -> list[float]:
    """Trials of the same value side by side."""
    found = []
    for i, place in enumerate(places):
        same = [k for k, other in enumerate(places) if abs(other - place) < 1e-9]
        step = min(0.02, 0.1 / len(same))
        found.append(place + step * (same.index(i) - (len(same) - 1) / 2))
    return found


def added_steps(
    names: Sequence[str],
    *,
    scores: Sequence[Accuracy],
    clean: Sequence[Accuracy | None],  # empty: not shown
    colour: ResultKind,
    name: str,
    alt: str,
) -> str:
    """The steps of an additive ablation from top to bottom, with intervals."""
    with new_figure(1, height=0.9 + 0.5 * len(names)) as (figure, (plot,)):
        series: list[tuple[Sequence[Accuracy | None], str, float]]
        series = [(scores, COLOURS[colour], 0.0), (clean, MEASURED, -0.16)]
        for shares, drawn, offset in series:
            points = [(y + offset, share) for y, share in enumerate(shares) if share]
            for y, share in points:
                plot.plot([100 * share.low, 100 * share.high], [y, y], color=drawn, linewidth=1.6)
            plot.plot(
                [100 * share.value for _, share in points],
                [y for y, _ in points],
                color=drawn,
                marker="o",
                markersize=6,
                linewidth=1,
            )
        plot.set_yticks(range(len(names)), [_cut(step) for step in names])
        plot.set_ylim(len(names) - 0.5, -0.5)  # first step on top
        plot.set_xlim(0, 100)
        plot.tick_params(axis="y", length=0)
        plot.set_xlabel("accuracy, % of validation items")
        return to_svg(figure, name=name, alt=alt)
