"""The chapter on tuning: trials, scores by value, ties with the best trial."""

from collections.abc import Mapping, Sequence
from typing import Any

from components.core.shares import measured_percent
from components.report import tuning_figures
from components.report.content import (
    Accuracy,
    Cell,
    Chapter,
    Chart,
    Column,
    LegendEntry,
    ResultKind,
    Table,
)
from components.report.evaluation.heat_maps import HeatCell, HeatLayout, heat_map, shade_legend
from components.report.records import AddedStep, TunedTrial, TuneResult
from components.report.wording import settings_text

NAMES = {"val_robust_accuracy": "robust accuracy", "val_accuracy": "accuracy"}


def chapter(tuned: TuneResult) -> Chapter:
    """Charts and a table of the trials, best first; for an additive ablation also its steps."""
    charts = _step_charts(tuned) if tuned.steps else _search_charts(tuned)
    tables = [trials_table(tuned)]
    if tuned.steps:
        tables.insert(0, steps_table(tuned))
    return Chapter("tuning", "Tuning", _intro(tuned), charts=tuple(charts), tables=tuple(tables))


def _intro(tuned: TuneResult) -> str:
    best, tied = tuned.trials[0], sum(trial.tied for trial in tuned.trials[1:])
    items = f"{best.score.num_items:,} " if best.score else ""
    words = [f"{len(tuned.trials)} trials, compared by {tuned.metric} on {items}validation items."]
    if tuned.metric == "val_robust_accuracy":
        words.append(f"The attack: {settings_text(tuned.attack)}, at the full epsilon.")
    if is_at_chance(tuned):
        words.append(
            f"The best trial is at chance: always predicting the most frequent label is right on "
            f"{measured_percent(tuned.chance or 0)}% of these items, which its interval does not "
            "exceed. This search does not tell its trials apart; train longer or on more items."
        )
    if tied:
        words.append(
            f"Ties with the best: {tied}; the 95% interval of the difference on these items "
            "contains 0."
        )
    if tuned.scheduler == "pbt":
        words.append(
            "Values changed during training, so the best trial is a schedule; train it again "
            "before quoting its figure."
        )
    return " ".join(words)


def is_at_chance(tuned: TuneResult) -> bool:
    """Whether the best trial is not above always predicting the most frequent label."""
    score = tuned.trials[0].score
    return score is not None and tuned.chance is not None and score.low <= tuned.chance


def trials_table(tuned: TuneResult) -> Table:
    """One row per trial, best first."""
    keys = list(dict.fromkeys(key for trial in tuned.trials for key in trial.values))
    named = any(trial.name for trial in tuned.trials)
    columns = (
        Column("trial", "number"),
        *([Column("step")] if named else []),
        *(Column(key) for key in keys),
        *_score_columns(tuned),
        Column("epochs", "number"),
        Column("status"),
        Column("told from the best"),
    )
    rows = tuple(
        (
            trial.number,
            *([trial.name] if named else []),
            *(_value(trial.values[key]) if key in trial.values else None for key in keys),
            *_score_cells(tuned, trial),
            trial.epochs,
            trial.status,
            _comparison(trial, is_best=trial is tuned.trials[0]),
        )
        for trial in tuned.trials
    )
    return Table("trials", columns, rows, marked=0, mark="best", title="Trials")


def steps_table(tuned: TuneResult) -> Table:
    """One row per step of an additive ablation, with its difference to the step before."""
    columns = (
        Column("step"),
        Column("what it sets"),
        *_score_columns(tuned),
        Column("points gained", "number"),
        Column("at least", "number", "95%"),
        Column("at most", "number", "95%"),
    )
    rows = tuple(
        (
            step.name,
            settings_text(step.changes) or "-",
            *_score_cells(tuned, step),
            *([100 * part for part in step.difference] if step.difference else [None] * 3),
        )
        for step in tuned.steps
    )
    return Table("additive", columns, rows, title="Step by step: each keeps what came before")


def _score_columns(tuned: TuneResult) -> tuple[Column, ...]:
    clean = Column("clean", "measured", "validation")
    if tuned.metric == "val_accuracy":
        return (clean,)
    return Column("under attack", result_kind(tuned), "validation"), clean


def _score_cells(tuned: TuneResult, row: TunedTrial | AddedStep) -> tuple[Cell, ...]:
    return (row.clean,) if tuned.metric == "val_accuracy" else (row.score, row.clean)


def result_kind(tuned: TuneResult) -> ResultKind:
    """The kind of result that the metric is."""
    return "attacked" if tuned.metric == "val_robust_accuracy" else "measured"


def _comparison(trial: TunedTrial, *, is_best: bool) -> str:
    if is_best:
        return "-"
    if trial.status != "finished":
        return "not compared"
    return "no: a tie" if trial.tied else "yes"


def _search_charts(tuned: TuneResult) -> list[Chart]:
    """A heat map of a grid of two keys, else parallel coordinates; then one chart per key."""
    shown = [trial for trial in tuned.trials if trial.score]
    keys = [key for key in tuned.space if any(key in trial.values for trial in shown)]
    if not shown or not keys:
        return []
    axes = [tuning_figures.axis_of(key, tuned.space[key], shown) for key in keys]
    charts = [_parallel_chart(tuned, axes, shown)] if len(axes) > 1 else []
    if len(keys) == 2 and all(isinstance(tuned.space[key], list) for key in keys):
        charts = [_heat_chart(tuned, keys, shown)]
    return charts + [_axis_chart(tuned, axis, shown) for axis in axes]


def _scored(tuned: TuneResult, shown: Sequence[TunedTrial]) -> tuning_figures.ScoredTrials:
    return tuning_figures.ScoredTrials(
        _scores(shown),
        [trial.status == "finished" for trial in shown],
        label=f"{NAMES[tuned.metric]}, %",
        colour=result_kind(tuned),
    )


def _parallel_chart(
    tuned: TuneResult, axes: Sequence[tuning_figures.PlotAxis], shown: Sequence[TunedTrial]
) -> Chart:
    best_text = f"The best trial: {settings_text(shown[0].values)}; {_score_text(shown[0], tuned)}."
    svg = tuning_figures.parallel_coordinates(
        axes,
        _scored(tuned, shown),
        name="tune.parallel",
        alt=f"Every trial as a line through its values. {best_text}",
    )
    legend = [
        LegendEntry("best trial", result_kind(tuned), "line"),
        LegendEntry("other trials", "muted", "line"),
    ]
    if any(trial.status != "finished" for trial in shown):
        legend.append(LegendEntry("stopped early", "muted", "dash"))
    return Chart("tune.parallel", "All trials", svg, tuple(legend), (best_text,))


def _heat_chart(tuned: TuneResult, keys: Sequence[str], shown: Sequence[TunedTrial]) -> Chart:
    """The scores of a grid: the first key down, the second across."""
    down, across = (tuned.space[key] for key in keys)
    places = [tuple(tuned.space[key].index(t.values[key]) for key in keys) for t in shown]
    found = dict(reversed(list(zip(places, shown, strict=True))))  # of equals, the better trial
    cells = [[_heat_cell(found.get((y, x))) for x in range(len(across))] for y in range(len(down))]
    layout = HeatLayout(
        tuning_figures.value_labels(down),
        tuning_figures.value_labels(across),
        keys[1],
        y_label=keys[0],
        marked=places[0],
    )
    best_text = f"The best trial: {settings_text(shown[0].values)}; {_score_text(shown[0], tuned)}."
    kind, measure = result_kind(tuned), NAMES[tuned.metric]
    svg = heat_map(
        cells,
        layout,
        kind=kind,
        name="tune.heat",
        alt=f"{measure} by {keys[0]} and {keys[1]}, in percent. {best_text}",
    )
    text = f"{measure} in percent, below its 95% interval; the darker, the more errors"
    legend = [shade_legend(text, kind), LegendEntry("framed: best trial", "muted", "line")]
    captions = [best_text]
    if any(trial.status != "finished" for trial in shown):
        captions.append("A star marks trials that were stopped early: another epoch's figure.")
    return Chart("tune.heat", "All trials", svg, tuple(legend), tuple(captions))


def _heat_cell(trial: TunedTrial | None) -> HeatCell | None:
    if trial is None or trial.score is None:
        return None
    score, star = trial.score, "" if trial.status == "finished" else "*"
    return HeatCell(1 - score.value, f"{measured_percent(score.value)}{star}", score.interval())


def _axis_chart(
    tuned: TuneResult, axis: tuning_figures.PlotAxis, shown: Sequence[TunedTrial]
) -> Chart:
    name, scored = f"tune.{axis.key}", _scored(tuned, shown)
    svg = tuning_figures.scores_by_value(
        axis,
        scored,
        name=name,
        alt=f"{NAMES[tuned.metric]} of every trial by {axis.key}.",
    )
    legend = [LegendEntry("a trial and its 95% interval", result_kind(tuned), "dot")]
    if not all(scored.finished):
        legend.append(LegendEntry("stopped early: another epoch's figure", "muted", "dot"))
    caption = "Trials above one value differ in their other values."
    return Chart(name, axis.key, svg, tuple(legend), (caption,) if len(tuned.space) > 1 else ())


def _step_charts(tuned: TuneResult) -> list[Chart]:
    shown = [step for step in tuned.steps if step.score]
    if not shown:
        return []
    svg = tuning_figures.added_steps(
        [step.name for step in shown],
        scores=_scores(shown),
        clean=[step.clean for step in shown] if tuned.metric != "val_accuracy" else [],
        colour=result_kind(tuned),
        name="tune.additive",
        alt="; ".join(f"{step.name}: {_score_text(step, tuned)}" for step in shown),
    )
    legend = [LegendEntry(f"{NAMES[tuned.metric]}, 95% interval", result_kind(tuned), "dot")]
    if tuned.metric != "val_accuracy":
        legend.append(LegendEntry("clean accuracy", "measured", "dot"))
    caption = "Each step keeps the changes of all steps above it."
    return [Chart("tune.additive", "Step by step", svg, tuple(legend), (caption,))]


def _scores(rows: Sequence[TunedTrial] | Sequence[AddedStep]) -> list[Accuracy]:
    return [row.score for row in rows if row.score]


def _score_text(row: TunedTrial | AddedStep, tuned: TuneResult) -> str:
    assert row.score is not None
    return f"{NAMES[tuned.metric]} {row.score.percent(result_kind(tuned))} [{row.score.interval()}]"


def _value(value: Any) -> Cell:
    if isinstance(value, Mapping):
        return settings_text(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)
