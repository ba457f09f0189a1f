"""Cost of a search: its trials are trainings, which a scheduler may end early."""

from dataclasses import replace

from components.core.errors import CasemateError
from pipelines.recipe.costs import Question, StepCost, Work, unknown_step
from pipelines.recipe.schema.recipe import MAIN, Recipe
from pipelines.recipe.schema.tune import AshaScheduler, PbtScheduler
from pipelines.recipe.trials import fixed_points, trial_recipe, tuned
from pipelines.stages.train.cost import TrainingCost, mean_works

MOST_COUNTED = 32  # trials; of more, so many evenly spread ones
FILES = 3  # trials.json, verdicts.parquet, best.yaml


def costs_of(recipe: Recipe, asked: Question) -> list[StepCost]:
    """The one step with all trials."""
    if recipe.tune is None:
        return []
    try:
        return [_step(recipe, asked)]
    except CasemateError as error:
        return [unknown_step("tune", error)]


def _step(recipe: Recipe, asked: Question) -> StepCost:
    section, points = tuned(recipe), fixed_points(recipe)
    num_trials = (
        len(points) if points is not None else int(getattr(section.search, "num_trials", 0))
    )
    counted = (points or [{}])[:: max(1, -(-num_trials // MOST_COUNTED) if points else 1)]
    trials = [
        TrainingCost.of(trial_recipe(recipe, values), MAIN, asked, train_items=section.train_items)
        for values in counted
    ]
    works = [
        replace(work, most=work.most * num_trials, least=work.least * num_trials)
        for work in mean_works([trial.works(asked) for trial in trials])
    ]
    share = _least_share(section.scheduler, epochs=max(trial.epochs for trial in trials))
    scaled: list[Work] = [replace(work, least=share * work.least) for work in works]
    state = max(trial.state_bytes() for trial in trials)
    return StepCost(
        step="tune",
        num_items=trials[0].num_train,
        works=scaled,
        memory=max(trial.memory(recipe.cluster.train_workers) for trial in trials),
        storage=10_000 + 300 * num_trials,
        objects=FILES,
        num_starts=1,
        assumed=_assumed(recipe, share, num_trials, len(trials)),
        own={
            "trials": num_trials,
            "epochs": max(trial.epochs for trial in trials),
            "checkpoint_bytes": 2 * num_trials * state,
        },
    )


def _least_share(scheduler: object, *, epochs: int) -> float:
    """Share of the epochs that successive halving trains if no more trials go on than it wants."""
    if not isinstance(scheduler, AshaScheduler):
        return 1.0
    rung, going, trained = min(scheduler.grace_epochs, epochs), 1.0, 0.0
    before = 0
    while True:
        trained += going * (rung - before)
        if rung >= epochs:
            return trained / epochs
        before, rung = rung, min(rung * scheduler.reduction_factor, epochs)
        going /= scheduler.reduction_factor


def _assumed(recipe: Recipe, share: float, num_trials: int, num_counted: int) -> list[str]:
    scheduler, found = tuned(recipe).scheduler, []
    if isinstance(scheduler, PbtScheduler):
        found.append("copies of trials are free")
    elif share < 1:
        found.append(f"asha ends trials early: at least {share:.0%} of all epochs are trained")
    if num_counted < num_trials:
        found.append(f"{num_trials} trials cost what {num_counted} of them do on average")
    return found
