"""The search on Ray Tune: points or proposals, a scheduler, and trials that resume."""

import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.schedulers import (
    ASHAScheduler,
    FIFOScheduler,
    PopulationBasedTraining,
    TrialScheduler,
)

from pipelines import build
from pipelines import sections as s
from pipelines.recipe import Recipe
from pipelines.runtime import progress
from pipelines.runtime.artifacts import StageDir
from pipelines.runtime.cluster import total_cpus
from pipelines.stages.tune_points import (
    fixed_points,
    generator,
    longest_warmup,
    mutated,
    tuned,
)
from pipelines.stages.tune_trial import EPOCHS, SCORE, trial


class SeededPbt(PopulationBasedTraining):  # type: ignore[misc]
    """Population-based training whose changes depend on seed, trial and epoch, not on time.

    All trials reach an epoch before any is replaced: otherwise the faster worker would decide.
    """

    def __init__(
        self, section: s.TuneSection, pbt: s.PbtScheduler, *, seed: int, burn_in: int
    ) -> None:
        super().__init__(
            time_attr=EPOCHS,
            perturbation_interval=pbt.interval,
            burn_in_period=burn_in,
            quantile_fraction=pbt.quantile,
            hyperparam_mutations={"point": {}},  # what changes is said by `_get_new_config`
            log_config=False,
            synch=True,
        )
        self.section, self.resample_prob, self.seed = section, pbt.resample_prob, seed

    def _get_new_config(self, trial: Any, trial_to_clone: Any) -> tuple[dict[str, Any], Any]:
        """The copied trial's config with other values, under this trial's own number."""
        point, number = trial_to_clone.config["point"], trial.config["point"]["trial"]
        epoch = int(self._trial_state[trial_to_clone].last_train_time)
        values = mutated(
            self.section,
            point["values"],
            resample_prob=self.resample_prob,
            rng=generator(self.seed, f"pbt {number}", epoch),
        )
        return {**trial_to_clone.config, "point": {"trial": number, "values": values}}, {}


def scheduler(recipe: Recipe, *, epochs: int) -> TrialScheduler:
    """What stops or replaces trials; `epochs` are those of the longest one."""
    section = tuned(recipe)
    match section.scheduler:
        case s.AshaScheduler() as asha:
            return ASHAScheduler(
                time_attr=EPOCHS,
                max_t=epochs,
                grace_period=min(asha.grace_epochs, epochs),
                reduction_factor=asha.reduction_factor,
            )
        case s.PbtScheduler() as pbt:
            warmup = longest_warmup(recipe)
            return SeededPbt(section, pbt, seed=recipe.seed, burn_in=warmup)
    return FIFOScheduler()


def fit(recipe: Recipe, inputs: Mapping[str, Path], out: StageDir, *, epochs: int) -> Any:
    """Run the trials, or those that an interrupted run left; Ray Tune's result grid."""
    cluster = recipe.cluster
    resources = {"cpu": cluster.cpus_per_train_worker, "gpu": cluster.gpus_per_worker}
    trainable = tune.with_resources(trial, resources)
    place = out.scratch / f"tune-{out.fingerprint[:12]}"
    if tune.Tuner.can_restore(str(place)) and any(place.glob("experiment_state-*.json")):
        tuner = tune.Tuner.restore(
            str(place), trainable=trainable, resume_unfinished=True, resume_errored=True
        )
    else:
        shutil.rmtree(place, ignore_errors=True)  # killed before anything was worth keeping
        tuner = _new_tuner(recipe, trainable, place, dataset=inputs["prepare"], epochs=epochs)

    def look(bar: progress.Bar) -> None:
        bar.at(sum(_lines(path) for path in place.glob("*/result.json")))

    random.seed(f"{recipe.seed}|tune")  # which of several good trials is copied (Ray's own draw)
    total = num_trials(recipe) * epochs
    with progress.follow(out.step, total=total, unit="trial epochs", look=look, every=1.0):
        return tuner.fit()


def num_trials(recipe: Recipe) -> int:
    """How many trials a search has."""
    points = fixed_points(recipe)
    search = tuned(recipe).search
    return len(points) if points is not None else getattr(search, "num_trials", 0)


def _new_tuner(
    recipe: Recipe, trainable: Any, place: Path, *, dataset: Path, epochs: int
) -> tune.Tuner:
    section, cluster, points = tuned(recipe), recipe.cluster, fixed_points(recipe)
    listed: dict[str, Any] = {}
    if points is not None:
        numbered = [{"trial": i, "values": values} for i, values in enumerate(points)]
        listed = {"point": tune.grid_search(numbered)}
    pbt = section.scheduler.kind == "pbt"
    return tune.Tuner(
        trainable,
        param_space={
            **listed,
            "recipe": build.on_this_machine(recipe).resolved(),
            "dataset": str(dataset),
            "num_threads": cluster.cpus_per_train_worker,
            "device": build.actor_device(cluster),
        },
        tune_config=tune.TuneConfig(
            metric=SCORE,
            mode="max",
            reuse_actors=True,
            max_concurrent_trials=max(1, total_cpus() // cluster.cpus_per_train_worker),
            scheduler=scheduler(recipe, epochs=epochs),
            search_alg=None if points is not None else _optuna(recipe),
            num_samples=1 if points is not None else num_trials(recipe),
        ),
        run_config=tune.RunConfig(
            name=place.name,
            storage_path=str(place.parent),
            verbose=0,
            # Without this a trial could still be replaced after its last epoch.
            stop={EPOCHS: epochs} if pbt else None,
            failure_config=tune.FailureConfig(max_failures=cluster.max_failures),
            # Trials copy the checkpoints of others, which must live that long.
            checkpoint_config=tune.CheckpointConfig(num_to_keep=8 if pbt else 2),
        ),
    )


def _optuna(recipe: Recipe) -> Any:
    from pipelines.stages.tune_optuna import NumberedSearch

    return NumberedSearch(tuned(recipe).space, seed=recipe.seed)


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")
