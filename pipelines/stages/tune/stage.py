"""Tune dotted recipe keys with Ray Tune; the winner becomes a recipe of its own.

The objective is accuracy on validation items, never on test.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from ray.tune import ResultGrid

from components.core.errors import CasemateError
from components.core.folders import Folder
from components.data.prepared import PreparedDataset
from pipelines.recipe import trials as tune_points
from pipelines.recipe.schema.recipe import Recipe
from pipelines.runtime.artifacts import StageDir
from pipelines.stages.tune import results as tune_results
from pipelines.stages.tune import search as tune_search
from pipelines.stages.tune.results import Comparison, Trial
from pipelines.stages.tune.training import MISTAKE


def run(recipe: Recipe, inputs: Mapping[str, Folder], out: StageDir) -> None:
    """Run or resume the trials, rank them, write tables, results per item and the best recipe."""
    epochs = tune_points.longest_epochs(recipe)
    results = tune_search.fit(recipe, inputs, out, epochs=epochs)
    trials = _finished(results, metric=tune_points.tuned(recipe).metric)
    compared = comparison(recipe, PreparedDataset.open(inputs["prepare"]))
    files = write(recipe, trials, compared, out)
    if trials[0].robust:
        files.append(_write_verdicts(trials, inputs["prepare"], out))
    tune_results.track(out, trials, metric=compared.metric)
    out.run.artifacts(*files)


def comparison(recipe: Recipe, dataset: PreparedDataset) -> Comparison:
    """How the trials of a recipe are compared on a dataset."""
    section, num_val = tune_points.tuned(recipe), dataset.splits["val"]
    attacked = min(section.attack.num_items, num_val)
    num_items = attacked if section.metric == "val_robust_accuracy" else num_val
    counts = Counter(dataset.listing("val")[1][:num_items])
    chance = max(counts.values()) / num_items
    return Comparison(section.metric, num_items, num_val, chance)


def write(
    recipe: Recipe, trials: Sequence[Trial], compared: Comparison, out: StageDir
) -> list[Path]:
    """The tables of ranked trials and the best recipe."""
    section = tune_points.tuned(recipe)
    table = tune_results.trials_table(recipe, trials, compared)
    files = [out.write_json("trials.json", table)]
    if section.changes:
        additive = tune_results.additive_table(recipe, trials, compared)
        files.append(out.write_json("additive.json", additive))
    if section.scheduler.kind == "pbt":
        schedule = {"trial": trials[0].number, "schedule": list(trials[0].schedule)}
        files.append(out.write_json("pbt_schedule.json", schedule))
    best = tune_results.best_recipe(recipe, trials, compared)
    return [*files, out.write_text("best.yaml", best)]


def _finished(results: ResultGrid, *, metric: str) -> list[Trial]:
    """All trials, ranked; one that broke, or a search without any result, is an error."""
    for result in results:
        if MISTAKE in (result.metrics or {}):
            raise CasemateError(*result.metrics[MISTAKE])
    broken = [result.error for result in results if result.error is not None]
    if broken:
        last = str(broken[0]).strip().splitlines()[-1]
        raise RuntimeError(f"{len(broken)} of {len(results)} trials failed: {last}")
    trials = tune_results.ranked([tune_results.read_trial(r) for r in results], metric=metric)
    if trials[0].stopped is not None:
        remedy = f"could be trained to its end: {trials[0].stopped}"
        raise CasemateError("tune", "no trial", remedy)
    return trials


def _write_verdicts(trials: Sequence[Trial], prepared: Folder, out: StageDir) -> Path:
    """`verdicts.parquet`: which validation items were robust in which trial."""
    attacked = PreparedDataset.open(prepared).load("val", limit=len(trials[0].robust))
    columns: dict[str, object] = {"item_id": list(attacked.item_ids)}
    for trial in sorted(trials, key=lambda trial: trial.number):
        if trial.robust:
            columns[f"trial_{trial.number}"] = tune_results.robust_items(trial)
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return out.write_bytes("verdicts.parquet", sink.getvalue().to_pybytes())
