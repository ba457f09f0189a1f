"""Finished trials to results: ranked table, additive table, best recipe, MLflow runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from ray.tune import Result

from components.core.shares import shown
from components.core.statistics import clopper_pearson_interval, difference, paired_difference
from components.core.types import Json
from pipelines.recipe.load import SMOKE, with_values
from pipelines.recipe.schema.recipe import Recipe
from pipelines.recipe.trials import Values, tuned
from pipelines.runtime.artifacts import StageDir
from pipelines.stages.tune.training import EPOCHS


@dataclass(frozen=True, slots=True)
class Trial:
    """Results of one trial, of the epoch whose weights it would keep."""

    number: int
    values: Values
    epochs: int
    finished: bool  # trained to its end, not stopped by the scheduler
    stopped: str | None  # why training cannot continue with these values
    figures: Mapping[str, float | None]
    robust: str  # per attacked validation item, in order: 1 = right under attack
    schedule: tuple[Json, ...]  # since which epoch it had which values
    history: tuple[Json, ...] = ()  # every epoch of the model that it ended with
    device: str = ""  # of its last epoch


def read_trial(result: Result) -> Trial:
    """A trial from its last report."""
    point, last = result.config["point"], result.metrics or {}
    stopped = last.get("stopped")
    return Trial(
        number=int(point["trial"]),
        values=point["values"],
        epochs=int(last[EPOCHS]),
        finished=bool(last.get("finished")),
        stopped=stopped,
        figures={} if stopped else last["kept"],
        robust="" if stopped else last["standing"],
        schedule=tuple(last.get("schedule", ())),
        history=tuple(last.get("history", ())),
        device=last.get("device", ""),
    )


def ranked(trials: Sequence[Trial], *, metric: str) -> list[Trial]:
    """Trials trained to the end first, the highest metric on top; then clean accuracy decides.

    A trial that was stopped early is judged by another epoch, so it never beats a finished one.
    """

    def key(trial: Trial) -> tuple[float, ...]:
        score, clean = trial.figures.get(metric), trial.figures.get("val_accuracy")
        unusable, length = trial.stopped is not None, 0 if trial.finished else -trial.epochs
        return unusable, not trial.finished, length, -(score or 0), -(clean or 0), trial.number

    return sorted(trials, key=key)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Trials compared by one metric on the same validation items."""

    metric: str
    num_items: int  # behind the metric
    num_clean: int  # behind clean accuracy
    chance: float  # share of the items behind the metric that have the most frequent label

    def share(self, trial: Trial, metric: str) -> Json | None:
        """{"value", "low", "high", "num_items"} with the exact 95% interval."""
        value = trial.figures.get(metric)
        if value is None:
            return None
        n = self.num_clean if metric == "val_accuracy" else self.num_items
        k = round(value * n)
        low, high = clopper_pearson_interval(k, n)
        return {"value": k / n, "low": low, "high": high, "num_items": n}

    def is_at_chance(self, trial: Trial) -> bool:
        """Whether the metric is not above that of always predicting the most frequent label.

        That share is at least 1 / the number of classes.
        """
        share = self.share(trial, self.metric)
        return share is not None and bool(shown(share)["low"] <= self.chance)

    def difference(self, trial: Trial, other: Trial) -> dict[str, float]:
        """The metric of a trial minus that of another; paired where results per item are kept."""
        if self.metric == "val_robust_accuracy":
            return paired_difference(robust_items(trial), robust_items(other))
        counts = [round((t.figures[self.metric] or 0) * self.num_items) for t in (trial, other)]
        return difference(*counts, n=self.num_items, n_before=self.num_items)


def robust_items(trial: Trial) -> NDArray[np.bool_]:
    """Per attacked validation item: right under attack."""
    return np.array([mark == "1" for mark in trial.robust])


def trials_table(recipe: Recipe, trials: Sequence[Trial], compared: Comparison) -> Json:
    """`trials.json`: ranked, with intervals; differences that are not significant are ties."""
    best, section = trials[0], tuned(recipe)
    rows = []
    for trial in trials:
        comparable = trial.finished and trial.stopped is None
        distance = compared.difference(trial, best) if comparable else None
        rows.append(
            {
                "trial": trial.number,
                "values": trial.values,
                compared.metric: compared.share(trial, compared.metric),
                "val_accuracy": compared.share(trial, "val_accuracy"),
                "epochs": trial.epochs,
                "status": _status(trial),
                "difference_to_best": distance,
                "tied_with_best": distance is not None and distance["low"] <= 0 <= distance["high"],
            }
        )
        if section.changes:
            rows[-1]["name"] = section.changes[trial.number].name
    return {
        "metric": compared.metric,
        "chance": compared.chance,
        "search": "changes" if section.changes else section.search.kind,
        "scheduler": section.scheduler.kind,
        "attack": section.attack.model_dump(mode="json"),
        "space": section.model_dump(mode="json")["space"],
        "rows": rows,
    }


def _status(trial: Trial) -> str:
    if trial.stopped is not None:
        return f"failed: {trial.stopped}"
    return "finished" if trial.finished else "stopped early"


def additive_table(recipe: Recipe, trials: Sequence[Trial], compared: Comparison) -> Json:
    """`additive.json`: the steps in order, each with its difference to the step before it."""
    steps = sorted(trials, key=lambda trial: trial.number)
    rows = []
    for before, trial in zip([None, *steps], steps, strict=False):
        change = tuned(recipe).changes[trial.number]
        known = before is not None and before.stopped is None and trial.stopped is None
        rows.append(
            {
                "name": change.name,
                "set": change.set,
                compared.metric: compared.share(trial, compared.metric),
                "val_accuracy": compared.share(trial, "val_accuracy"),
                "difference": compared.difference(trial, before) if known and before else None,
            }
        )
    return {"metric": compared.metric, "rows": rows}


def best_recipe(recipe: Recipe, trials: Sequence[Trial], compared: Comparison) -> str:
    """`best.yaml`: a recipe that runs, headed by how it was chosen."""
    best = trials[0]
    winner = with_values(recipe, {**best.values, "name": f"{recipe.name}-tuned", "tune": None})
    chosen = f"by {compared.metric} on {compared.num_items} validation items: {best.values}"
    lines = [f"# Best of {len(trials)} trials of `{recipe.name}` {chosen}"]
    ties = [t for t in trials[1:] if t.finished and t.stopped is None]
    ties = [t for t in ties if compared.difference(best, t)["low"] <= 0]
    if ties:
        lines.append(f"# {len(ties)} further trials cannot be told from it on these items.")
    if recipe.source.endswith(SMOKE):
        lines.append("# A search in smoke size: this recipe is shrunk, its values mean nothing.")
    if compared.is_at_chance(best):
        lines.append("# It is at chance: not above predicting the most frequent label everywhere.")
    if len(best.schedule) > 1:
        lines.append("# These are the last values of a schedule (pbt_schedule.json), not what the")
        lines.append("# trial was trained with: retrain before you quote any figure.")
    return "\n".join(lines) + "\n" + winner.to_yaml()


def track(out: StageDir, trials: Sequence[Trial], *, metric: str) -> None:
    """One child run per trial; the best value on the stage's run.

    Epochs have the names of a training's, so that MLflow draws the curves of both together.
    """
    for trial in trials:
        tags = {"casemate.trial": str(trial.number), "casemate.tune": out.fingerprint}
        run = out.run.child(f"trial-{trial.number}", tags)
        run.params(trial.values)
        for number, epoch in enumerate(trial.history):
            run.metrics({f"train/{key}": value for key, value in epoch.items()}, step=number)
        run.metrics({f"tune/{metric}": trial.figures.get(metric)})  # of the epoch that is kept
        run.tags({"casemate.status": _status(trial), "casemate.device": trial.device})
        run.finish("FAILED" if trial.stopped is not None else "FINISHED")
    out.run.metrics({f"tune/best_{metric}": trials[0].figures[metric]})
