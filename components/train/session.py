"""One training from first to last epoch: a function of its checkpoint, so it resumes exactly.

A checkpoint may be taken between any two steps. Workers hold the same state except for their part
of the running epoch's sums: these are added up before a checkpoint and stay with the first worker.
"""

import time
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from components.core.errors import CasemateError
from components.core.seeding import generator_for
from components.data.prepared import Split
from components.models.pixels import PixelModel
from components.models.spec import ModelSpec
from components.train.averaging import weight_average
from components.train.epoch import EpochPlan, StepDone, epoch_batches, train_epoch
from components.train.feed import Feeding, TrainingSet, Worker
from components.train.objectives.base import Objective
from components.train.passes import prepare_passes
from components.train.selection import Selection
from components.train.sharding import (
    check_shardable,
    is_sharded,
    load_weights,
    optimizer_parts,
    share_statistics,
    unsharded,
    whole,
)
from components.train.tally import Tally, Total
from components.train.validation import (
    AttackPredictions,
    Workers,
    robust_accuracy,
    validation_attack,
    validation_score,
)

Row = dict[str, float | int | None]
PROBES = 10  # probed steps in a row between looks at the counts of all workers
EVIDENCE = ("rescued", "broken")  # counts behind `leak`; rows show their difference


class TrainingStoppedError(CasemateError):
    """A training that all workers stop at the same step; a restart would stop there again."""


def initial_model(spec: ModelSpec, *, seed: int) -> PixelModel:
    """A freshly initialised model: the same weights for the same seed, on every worker."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator_for(seed, "init").initial_seed())
        return PixelModel(spec)


class Session:
    """Model, optimiser, data and objective of one training, on one worker."""

    def __init__(
        self,
        model: PixelModel,
        objective: Objective,
        *,
        train: Split,
        val: Split,
        synthetic: Split | None = None,
        plan: EpochPlan,
        checkpoint_steps: int | None = None,
        wrap: Callable[[PixelModel], nn.Module] = lambda model: model,
        worker: Worker = Worker(),  # noqa: B008 - frozen
        feeding: Feeding = Feeding(),  # noqa: B008 - frozen
    ) -> None:
        self.model, self.objective, self.plan, self.worker = model, objective, plan, worker
        settings = plan.train
        self.train = TrainingSet(train, synthetic, plan.synthetic_ratio)
        self.val, self.attacked, self.feeding = val, val.take(settings.val_items), feeding
        self.val_attack: AttackPredictions | None = validation_attack(settings, objective)
        self.leak = objective.leak_detector() if settings.stop_on_leak else None
        self.selection, self.checkpoint_steps = Selection(settings), checkpoint_steps
        objective.prepare(model)
        self.average = weight_average(model, settings.average)
        self.passes = prepare_passes(model, settings)
        self.wrapped = wrap(model)
        if is_sharded(model):
            check_shardable(model, objective)
            if self.average:
                self.average.shard()
        self.updater = plan.updater(model)  # after wrapping
        self.history: list[Row] = []
        self.num_done, self.tally = 0, Tally()  # steps of the running epoch, and their sums
        self.probed: list[Tally] = []  # of probed steps that were not looked at

    @property
    def next_epoch(self) -> int:
        return len(self.history)

    @property
    def finished(self) -> bool:
        """Whether the last epoch is over, or early stopping has ended the training."""
        last = self.next_epoch - 1
        return self.next_epoch >= self.plan.epochs or self.selection.given_up(last)

    @property
    def evaluated(self) -> PixelModel:
        """The model that is validated and kept: the average, if there is one."""
        averaged = self.average.model if self.average else None
        return averaged or self.model

    @property
    def selected_epoch(self) -> int:
        """The epoch whose weights `final_model` has."""
        best = self.selection.best_epoch if self.selection.best_weights else None
        return self.next_epoch - 1 if best is None else best

    @property
    def selection_metric(self) -> str:
        """The validation metric that decides which epoch is the best.

        Accuracy under attack selects models that were trained on attacks. For others it is highest
        when they have learned least, so it is only reported.
        """
        attacked = self.val_attack and self.objective.eps is not None
        return "val_robust_accuracy" if attacked else self.objective.validation_metric

    @property
    def progress(self) -> float:
        """Share of the running epoch that is done."""
        return self.num_done / self.plan.batches(self.train).num_batches

    def running(self) -> Row:
        """This worker's means of the running epoch, with the keys of a finished one."""
        return self._row(self.next_epoch, self.tally, lr=self.updater.learning_rate)

    def final_model(self) -> PixelModel:
        """The selected model, as an ordinary model; training can go on. Call it on all workers."""
        model, best = unsharded(self.evaluated), self.selection.best_weights
        if best is None and not self.objective.has_state:
            return model
        model = deepcopy(model)
        if best is not None:
            model.load_state_dict(best)
        self.objective.finish(model)
        return model

    def state(self) -> dict[str, Any]:
        """Everything the next step depends on; random numbers have no state.

        All workers must call it: sharded weights are gathered, on the first worker only.
        """
        return {
            "model": whole(self.model.state_dict()),
            "updater": whole(self.updater.state()),
            "history": self.history,
            "average": self.average.state() if self.average else None,
            "objective": self.objective.state(),
            "selection": self.selection.state(),
            "leak": self.leak.state() if self.leak else None,
            "num_done": self.num_done,
            "tally": self.tally.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        load_weights(self.model, state["model"])
        optimizer = optimizer_parts(state["updater"]["optimizer"], self.updater.optimizer)
        self.updater.restore({**state["updater"], "optimizer": optimizer})
        self.history = list(state["history"])
        if self.average:
            self.average.restore(state["average"])
        self.objective.restore(state["objective"])
        self.selection.restore(state["selection"])
        if self.leak:
            self.leak.restore(state["leak"])
        self.num_done, self.tally = state["num_done"], Tally.restored(state["tally"])
        self._move_sums_to_first_worker()

    def run_epoch(
        self,
        *,
        total: Total = lambda sums: sums,
        on_step: Callable[[int, int], None] = lambda step, steps: None,
        on_checkpoint: Callable[[], None] = lambda: None,
    ) -> Row:
        """Train one epoch, or the rest of it, and validate.

        `total` adds the sums of all workers. `on_checkpoint` is called every `checkpoint_steps`
        inside the epoch, on all workers: `state()` may be saved there, and after the epoch.
        """
        epoch, began = self.next_epoch, time.perf_counter()
        if self.num_done == 0:
            self._begin(epoch)

        def after_step(done: StepDone) -> None:
            self.num_done = done.num_done
            self.tally.merge(done.tally)
            if self.average:
                self.average.after_step(self.model)
            self._watch_for_leaks(done.tally, total)
            on_step(done.num_done, done.num_steps)
            every = self.checkpoint_steps
            if every and done.num_done % every == 0 and done.num_done < done.num_steps:
                self._look_for_leaks(total)
                self.tally = self.tally.over_workers(total)
                self._move_sums_to_first_worker()
                on_checkpoint()

        part = self._train(epoch, after_step)
        self._look_for_leaks(total)
        if self.average:
            self.average.after_epoch(self.model, epoch)
        row = self._row(epoch, self.tally.over_workers(total), lr=part["lr"])
        evaluated = unsharded(self.evaluated)
        row |= self._validate(evaluated, Workers(self.worker, total))
        self._select(row, total, evaluated)
        row["wait_seconds"] = round(part["wait_seconds"], 3)  # this worker's, for data
        row["images_per_second"] = round(part["images_per_second"] * self.worker.world, 1)
        row["seconds"] = round(time.perf_counter() - began, 3)
        self.history.append(row)
        self.num_done, self.tally = 0, Tally()
        return row

    def _begin(self, epoch: int) -> None:
        if not self.objective.searches(epoch):
            return
        batches = epoch_batches(
            self.train,
            self.model,
            plan=self.plan,
            epoch=epoch,
            worker=Worker(),  # global batches: the same on all workers
            feeding=self.feeding,
        )
        with batches:
            self.objective.begin_epoch(self.model, epoch, batches)

    def _train(self, epoch: int, after_step: Callable[[StepDone], None]) -> dict[str, float]:
        if not self.objective.trains(epoch):
            num_steps = self.plan.batches(self.train).num_batches
            lr = self.plan.rate_at(epoch, 0, steps_per_epoch=num_steps)
            return {"lr": lr, "images_per_second": 0.0, "wait_seconds": 0.0}
        return train_epoch(
            self.wrapped,
            self.model,
            self.train,
            self.objective,
            self.updater,
            plan=self.plan,
            epoch=epoch,
            worker=self.worker,
            feeding=self.feeding,
            first_step=self.num_done,
            after_step=after_step,
        )

    def _move_sums_to_first_worker(self) -> None:
        if self.worker.rank > 0:
            self.tally = self.tally.emptied()

    def _watch_for_leaks(self, tally: Tally, total: Total) -> None:
        """Collect probed steps; reading them makes the host wait, so that is done now and then."""
        probed = self.leak is not None and tally.count("rescued") > 0
        if probed:
            self.probed.append(tally)
        if not probed or len(self.probed) == PROBES:
            self._look_for_leaks(total)

    def _look_for_leaks(self, total: Total) -> None:
        if self.leak is None or not self.probed:
            return
        for tally in self.probed:
            shared = tally.over_workers(total)
            self.leak.update(shared.means(), num_items=shared.count("rescued"))
        self.probed = []
        try:
            self.leak.check()
        except CasemateError as error:
            raise TrainingStoppedError(*error.args) from error

    def _row(self, epoch: int, tally: Tally, *, lr: float) -> Row:
        means = tally.means()
        row: Row = {
            "epoch": epoch,
            "lr": lr,
            "eps": self.objective.eps_at(epoch),
            "loss": means.pop("loss", None),
            "train_accuracy": means.pop("accuracy", None),
            "val_accuracy": None,
            "val_robust_accuracy": None,
        }
        further = {f"train_{name}": mean for name, mean in means.items() if name not in EVIDENCE}
        return row | further

    def _validate(self, model: PixelModel, workers: Workers) -> Row:
        """Validation figures of all workers together, equal on each of them."""
        share_statistics(model)
        seed, key = self.plan.seed, self.objective.validation_metric
        score = validation_score(model, self.val, self.objective, seed=seed, workers=workers)
        row: Row = {key: score}
        if self.val_attack is not None:
            row["val_robust_accuracy"] = robust_accuracy(
                model, self.attacked, self.val_attack, seed=seed, workers=workers
            )
        return row

    def _select(self, row: Row, total: Total, evaluated: PixelModel) -> None:
        """Select by the first worker's value on all workers; the largest is the best."""
        if not self.selection.is_on:
            return
        sign = -1 if self.objective.lower_is_better else 1
        value = row.get(self.selection_metric) if self.worker.rank == 0 else None
        own = torch.tensor([value or 0.0], dtype=torch.float64)
        self.selection.consider(sign * float(total(own)), self.next_epoch, evaluated)
