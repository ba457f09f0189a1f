"""Schedulers that stop or replace trials, and their state for a resumed search.

Ray saves trials and proposals of a search, but nothing of its scheduler: `state` and `restore` are
what a snapshot adds.
"""

import random
from typing import Protocol, runtime_checkable

from ray.tune.execution.tune_controller import TuneController
from ray.tune.experiment import Trial
from ray.tune.schedulers import (
    ASHAScheduler,
    FIFOScheduler,
    PopulationBasedTraining,
    TrialScheduler,
)

from pipelines.recipe.schema.recipe import Recipe
from pipelines.recipe.schema.tune import AshaScheduler, PbtScheduler, TuneSection
from pipelines.recipe.trials import generator, longest_warmup, mutated, tuned
from pipelines.stages.tune.training import EPOCHS


@runtime_checkable
class KeptScheduler(Protocol):
    """A scheduler whose decisions depend on what it has seen before."""

    def state(self) -> dict[str, object]: ...

    def restore(self, state: dict[str, object]) -> None:
        """Before the trials are added again."""
        ...


def scheduler(recipe: Recipe, *, epochs: int) -> TrialScheduler:
    """The scheduler of a recipe; `epochs` are those of the longest trial."""
    section = tuned(recipe)
    match section.scheduler:
        case AshaScheduler() as asha:
            return KeptAsha(
                time_attr=EPOCHS,
                max_t=epochs,
                grace_period=min(asha.grace_epochs, epochs),
                reduction_factor=asha.reduction_factor,
            )
        case PbtScheduler() as pbt:
            warmup = longest_warmup(recipe)
            return SeededPbt(section, pbt, seed=recipe.seed, burn_in=warmup)
    return FIFOScheduler()


class KeptAsha(ASHAScheduler):  # type: ignore[misc]
    """Successive halving that resumes with the rungs of an interrupted search.

    A trial repeats the epoch that a kill took from it; the rung has seen that epoch before and
    would let it pass, so the stopped trials are kept, too.
    """

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        self.told_to_stop: set[str] = set()

    def on_trial_result(
        self, tune_controller: TuneController, trial: Trial, result: dict[str, object]
    ) -> str:
        decision: str = super().on_trial_result(tune_controller, trial, result)
        if decision == TrialScheduler.STOP:
            self.told_to_stop.add(trial.trial_id)
        return TrialScheduler.STOP if trial.trial_id in self.told_to_stop else decision

    def state(self) -> dict[str, object]:
        return {"_brackets": self._brackets, "told_to_stop": self.told_to_stop}

    def restore(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)


class SeededPbt(PopulationBasedTraining):  # type: ignore[misc]
    """Population-based training whose changes depend on seed, trial and epoch, not on time.

    All trials reach an epoch before any is replaced: otherwise the faster worker would decide.
    """

    def __init__(self, section: TuneSection, pbt: PbtScheduler, *, seed: int, burn_in: int) -> None:
        super().__init__(
            time_attr=EPOCHS,
            perturbation_interval=pbt.interval,
            burn_in_period=burn_in,
            quantile_fraction=pbt.quantile,
            hyperparam_mutations={"point": {}},  # `_get_new_config` makes the changes
            log_config=False,
            synch=True,
        )
        self.section, self.resample_prob, self.seed = section, pbt.resample_prob, seed
        self.known: dict[str, dict[str, object]] = {}  # of the trials of an interrupted search

    def on_trial_add(self, tune_controller: TuneController, trial: Trial) -> None:
        """Restore the state of a trial that is back after a failure or a restart.

        Ray starts every pending trial at once; one that waits for the others is paused.
        """
        before = self._trial_state.get(trial)
        super().on_trial_add(tune_controller, trial)
        state = self._trial_state[trial]
        state.__dict__.update(vars(before) if before else self.known.get(trial.trial_id, {}))
        waits = state.last_train_time >= self._next_perturbation_sync
        if before is None and waits and trial.status == Trial.PENDING:
            trial.set_status(Trial.PAUSED)

    def _checkpoint_or_exploit(self, trial: Trial, *arguments: object) -> None:
        """Ray draws which good trial is copied from Python's own random numbers."""
        number, epoch = trial.config["point"]["trial"], self._trial_state[trial].last_train_time
        random.seed(f"{self.seed}|pbt {number}|{epoch}")
        super()._checkpoint_or_exploit(trial, *arguments)

    def _exploit(
        self, tune_controller: TuneController, trial: Trial, trial_to_clone: Trial
    ) -> None:
        super()._exploit(tune_controller, trial, trial_to_clone)
        # Ray would save the change only when the trial starts again.
        tune_controller._tune_controller._mark_trial_to_checkpoint(trial)

    def _get_new_config(
        self, trial: Trial, trial_to_clone: Trial
    ) -> tuple[dict[str, object], dict[str, object]]:
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

    def state(self) -> dict[str, object]:
        """The state of the trials; checkpoints to copy are chosen again at every change."""
        known = {trial.trial_id: dict(vars(own)) for trial, own in self._trial_state.items()}
        return {
            "known": {i: own | {"last_checkpoint": None} for i, own in known.items()},
            "_next_perturbation_sync": self._next_perturbation_sync,
        }

    def restore(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
