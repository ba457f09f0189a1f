"""The search on Ray Tune: points or proposals, a scheduler, and trials that resume."""

from collections.abc import Callable, Mapping

from ray import tune
from ray.tune.execution import class_cache
from ray.tune.search import Searcher

from components.core.folders import Folder, absolute, scheme_of
from pipelines.recipe import build
from pipelines.recipe.schema.place import ClusterSection
from pipelines.recipe.schema.recipe import Recipe
from pipelines.recipe.schema.tune import PbtScheduler, TuneSection
from pipelines.recipe.trials import fixed_points, tuned
from pipelines.runtime import progress
from pipelines.runtime.artifacts import StageDir
from pipelines.runtime.cluster import is_local, total_cpus, train_resources
from pipelines.runtime.devices import total_gpus
from pipelines.runtime.gauges import shown_at
from pipelines.runtime.store import open_store
from pipelines.runtime.waiting import wait_for_room
from pipelines.stages.tune.schedulers import scheduler
from pipelines.stages.tune.snapshot import REPORTED, Snapshots, unpack
from pipelines.stages.tune.training import EPOCHS, MISTAKE, SCORE, TrialJob
from pipelines.stages.tune.worker import trial

# Ray Tune would put AWS credentials into arguments of processes and into its logs. Trials read and
# write folders; workers of a local Ray inherit the environment anyway.
class_cache.ENV_VARS_TO_PROPAGATE = {
    name for name in class_cache.ENV_VARS_TO_PROPAGATE if not name.startswith("AWS_")
}


class Ending(tune.Stopper):  # type: ignore[misc]
    """Ends trials at their last epoch, if one is given, and all of them at a user's mistake."""

    def __init__(self, epochs: int | None) -> None:
        self.epochs, self.is_mistaken = epochs, False

    def __call__(self, trial_id: str, result: Mapping[str, int]) -> bool:
        self.is_mistaken |= MISTAKE in result
        return self.epochs is not None and result.get(EPOCHS, 0) >= self.epochs

    def stop_all(self) -> bool:
        return self.is_mistaken


def fit(
    recipe: Recipe, inputs: Mapping[str, Folder], out: StageDir, *, epochs: int
) -> tune.ResultGrid:
    """Run the trials, or the unfinished ones of an interrupted run; Ray Tune's result grid."""
    trainable = tune.with_resources(trial, trial_resources(recipe.cluster))
    wait_for_room(
        train_resources(recipe.cluster),
        num_workers=recipe.cluster.train_workers,
        label=out.step,
        max_wait=recipe.cluster.max_wait,
    )
    place = open_store(f"{out.ray_storage}/tune-{out.fingerprint[:12]}")
    tuner, known = None, [entry.key for entry in place.listing("")]
    REPORTED.clear()
    if known:
        if lost := unpack(place):
            progress.say(f"{out.step}: the interrupted search starts anew: {lost}")
            place.delete(known)
        else:
            tuner = tune.Tuner.restore(
                place.root, trainable=trainable, resume_unfinished=True, resume_errored=True
            )
    dataset = absolute(inputs["prepare"])
    tuner = tuner or _new_tuner(recipe, trainable, place.root, dataset=dataset, epochs=epochs)

    def look(bar: progress.Bar) -> None:
        bar.at(sum(tuple(REPORTED.values())))

    total = num_trials(recipe) * epochs
    shown = shown_at(out)
    with progress.follow(out.step, total=total, unit="trial epochs", look=look, every=1.0, **shown):
        return tuner.fit()


def trial_resources(cluster: ClusterSection) -> dict[str, float] | tune.PlacementGroupFactory:
    """What a trial holds: one worker's resources, or those of all its workers and none itself.

    Ray Tune places them together and frees them together, however the trial ends.
    """
    if cluster.train_workers == 1:
        return {"cpu": cluster.cpus_per_train_worker, "gpu": cluster.gpus_per_train_worker}
    return tune.PlacementGroupFactory([{}, *[train_resources(cluster)] * cluster.train_workers])


def _num_at_once(cluster: ClusterSection, *, proposed: bool) -> int | None:
    """Trials side by side: as many as fit now; None: as many as fit, also on nodes that join.

    Proposals depend on earlier results, so they must not all be made at once.
    """
    if not proposed and not is_local():
        return None
    workers = cluster.train_workers
    fit = total_cpus() // (workers * cluster.cpus_per_train_worker)
    if gpus := workers * cluster.gpus_per_train_worker:
        fit = min(fit, int(total_gpus() // gpus))
    return max(1, fit)


def num_trials(recipe: Recipe) -> int:
    """How many trials a search has."""
    points = fixed_points(recipe)
    search = tuned(recipe).search
    return len(points) if points is not None else getattr(search, "num_trials", 0)


def num_checkpoints(section: TuneSection) -> int:
    """How many a trial keeps.

    One that goes on as a copy may get its turn when the copied one has trained a whole interval.
    """
    scheduler = section.scheduler
    return scheduler.interval + 3 if isinstance(scheduler, PbtScheduler) else 2


def _new_tuner(
    recipe: Recipe, trainable: Callable[..., object], place: str, *, dataset: str, epochs: int
) -> tune.Tuner:
    section, cluster, points = tuned(recipe), recipe.cluster, fixed_points(recipe)
    listed: dict[str, object] = {}
    if points is not None:
        numbered = [{"trial": i, "values": values} for i, values in enumerate(points)]
        listed = {"point": tune.grid_search(numbered)}
    job = TrialJob(
        recipe=build.with_absolute_paths(recipe).resolved(),
        dataset=dataset,
        num_threads=cluster.cpus_per_train_worker,
    )
    (above, _, name), scheme = place.rpartition("/"), scheme_of(place)
    pbt, stops = section.scheduler.kind == "pbt", scheduler(recipe, epochs=epochs)
    return tune.Tuner(
        trainable,
        param_space={**listed, "job": job},
        tune_config=tune.TuneConfig(
            metric=SCORE,
            mode="max",
            reuse_actors=True,
            # Ray counts paused trials, too. A population exists as a whole and takes turns.
            max_concurrent_trials=None if pbt else _num_at_once(cluster, proposed=points is None),
            scheduler=stops,
            search_alg=None if points is not None else _optuna(recipe),
            num_samples=1 if points is not None else num_trials(recipe),
        ),
        run_config=tune.RunConfig(
            name=name,
            storage_path=above,
            verbose=0,
            callbacks=[Snapshots(stops, scheme=scheme)],
            # Without an end a trial of a population could still be replaced after its last epoch.
            stop=Ending(epochs if pbt else None),
            failure_config=tune.FailureConfig(max_failures=cluster.max_failures),
            checkpoint_config=tune.CheckpointConfig(num_to_keep=num_checkpoints(section)),
        ),
    )


def _optuna(recipe: Recipe) -> Searcher:
    from pipelines.stages.tune.optuna_search import NumberedSearch

    return NumberedSearch(tuned(recipe).space, seed=recipe.seed)
