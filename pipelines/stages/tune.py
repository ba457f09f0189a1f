"""Tune dotted recipe keys with Ray Tune and ASHA; the winner becomes a recipe of its own.

The objective is accuracy on validation items, never on test.
"""

import json
import tempfile
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler

from components.core.errors import CasemateError
from components.data.prepared import PreparedDataset
from pipelines import build
from pipelines import recipe as recipes
from pipelines.recipe import MAIN, Recipe
from pipelines.runtime import progress
from pipelines.runtime.artifacts import StageDir
from pipelines.runtime.cluster import total_cpus
from pipelines.stages.train import make_session
from pipelines.stages.train_worker import STATE


def trial(config: dict[str, Any]) -> None:
    """One trial: the recipe with other values, trained for the trial's epochs in one process."""
    torch.set_num_threads(config["num_threads"])
    recipe = trial_recipe(recipes.parse(config["recipe"], source="recipe"), config["values"])
    assert recipe.tune is not None
    dataset = PreparedDataset.open(Path(config["dataset"]))
    data = dataset.load("train", limit=recipe.tune.train_items)
    session = make_session(recipe, MAIN, dataset, train=data, device=torch.device(config["device"]))
    if checkpoint := tune.get_checkpoint():
        with checkpoint.as_directory() as folder:
            session.restore(torch.load(Path(folder) / STATE, weights_only=True))
    while not session.finished:
        row = session.run_epoch()
        with tempfile.TemporaryDirectory() as folder:
            torch.save(session.state(), Path(folder) / STATE)
            tune.report(row, checkpoint=tune.Checkpoint.from_directory(folder))


def trial_recipe(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """The recipe of one trial: its values, at the tuning's number of epochs."""
    assert recipe.tune is not None
    epochs = {"train.epochs": recipe.tune.epochs} if recipe.tune.epochs else {}
    return recipe.with_values({**epochs, **values})


def grid(space: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    """Every combination of the space, in the order it is written."""
    return [dict(zip(space, values, strict=True)) for values in product(*space.values())]


def run(recipe: Recipe, inputs: Mapping[str, Path], out: StageDir) -> None:
    """Run or resume the trials, rank them, write `trials.json` and `best.yaml`."""
    section = recipe.tune
    assert section is not None
    points = grid(section.space)
    _check(recipe, points)
    grid_results = _fit(recipe, inputs, out, points)
    rows = [_row(result, points, section.metric) for result in grid_results]
    failed = [row for row in rows if row["status"] != "ok"]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(rows)} trials failed: {failed[0]['status']}")
    rows.sort(key=lambda row: (-row[section.metric], row["trial"]))
    out.write_json("trials.json", {"metric": section.metric, "rows": rows})
    best = {key: rows[0][key] for key in section.space}
    winner = recipe.with_values({**best, "name": f"{recipe.name}-tuned", "tune": None})
    ranking = f"by {section.metric} on validation items: {best}"
    note = f"# Best of {len(rows)} trials of `{recipe.name}` {ranking}\n"
    out.write_text("best.yaml", note + winner.to_yaml())
    _track(out, rows, grid_results, section.metric)


def _check(recipe: Recipe, points: list[dict[str, Any]]) -> None:
    """Every point must make a valid recipe whose model is measured by the metric."""
    assert recipe.tune is not None
    for values in points:
        for key in values:
            if not key.startswith(("train.", "model.")):
                raise CasemateError("tune.space", key, "does not begin with train. or model.")
        variant = trial_recipe(recipe, values)
        if recipe.tune.metric == "val_robust_accuracy" and not build.validation_eps(variant, MAIN):
            raise CasemateError(
                "tune.metric", recipe.tune.metric, "needs an adversarial objective or train.val_eps"
            )


def _fit(
    recipe: Recipe, inputs: Mapping[str, Path], out: StageDir, points: list[dict[str, Any]]
) -> Any:
    section, cluster = recipe.tune, recipe.cluster
    assert section is not None
    epochs = trial_recipe(recipe, points[0]).epochs_of(MAIN)
    resources = {"cpu": cluster.cpus_per_train_worker, "gpu": cluster.gpus_per_worker}
    trainable = tune.with_resources(trial, resources)
    name, storage = f"tune-{out.fingerprint[:12]}", out.scratch
    if tune.Tuner.can_restore(str(storage / name)):
        tuner = tune.Tuner.restore(
            str(storage / name), trainable=trainable, resume_unfinished=True, resume_errored=True
        )
    else:
        tuner = tune.Tuner(
            trainable,
            param_space={
                "values": tune.grid_search(points),
                "recipe": build.on_this_machine(recipe).resolved(),
                "dataset": str(inputs["prepare"]),
                "num_threads": cluster.cpus_per_train_worker,
                "device": build.actor_device(cluster),
            },
            tune_config=tune.TuneConfig(
                metric=section.metric,
                mode="max",
                reuse_actors=True,
                max_concurrent_trials=max(1, total_cpus() // cluster.cpus_per_train_worker),
                scheduler=ASHAScheduler(
                    time_attr="training_iteration",
                    max_t=epochs,
                    grace_period=min(section.grace_epochs, epochs),
                    reduction_factor=section.reduction_factor,
                ),
            ),
            run_config=tune.RunConfig(name=name, storage_path=str(storage), verbose=0),
        )

    def look(bar: progress.Bar) -> None:
        bar.at(sum(_lines(path) for path in (storage / name).glob("*/result.json")))

    total = len(points) * epochs
    with progress.follow(out.step, total=total, unit="trial epochs", look=look, every=1.0):
        return tuner.fit()


def _row(result: Any, points: list[dict[str, Any]], metric: str) -> dict[str, Any]:
    values = result.config["values"]
    status = "ok" if result.error is None else str(result.error).strip().splitlines()[-1]
    metrics = result.metrics or {}
    return {
        "trial": points.index(values),
        **values,
        metric: metrics.get(metric),
        "val_accuracy": metrics.get("val_accuracy"),
        "epochs": metrics.get("training_iteration", 0),
        "status": status,
    }


def _track(out: StageDir, rows: list[dict[str, Any]], results: Any, metric: str) -> None:
    """One child run per trial with its epochs; the best value on the stage's run."""
    number = {json.dumps({k: r[k] for k in _values(r)}, default=str): r["trial"] for r in rows}
    for result in results:
        values = result.config["values"]
        index = number[json.dumps(values, default=str)]
        run = out.run.child(
            f"trial-{index}", {"casemate.trial": str(index), "casemate.tune": out.fingerprint}
        )
        run.params(values)
        for _, epoch in result.metrics_dataframe.iterrows():
            kept = ("loss", "val_accuracy", "val_robust_accuracy", "train_accuracy")
            run.metrics(
                {f"tune/{k}": epoch[k] for k in kept if k in epoch and epoch[k] == epoch[k]},
                step=int(epoch["epoch"]),
            )
        run.finish()
    out.run.metrics({f"tune/best_{metric}": rows[0][metric]})
    out.run.artifacts(out.path / "trials.json", out.path / "best.yaml")


def _values(row: dict[str, Any]) -> list[str]:
    return [key for key in row if "." in key]


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")
