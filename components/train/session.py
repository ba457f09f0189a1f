"""One training from first to last epoch: a function of its checkpoint, so it resumes exactly."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from components.core.seeding import generator_for
from components.data.prepared import Split
from components.models.pixels import PixelModel
from components.models.spec import ModelSpec
from components.train.epoch import EpochSettings, make_optimizer, train_epoch
from components.train.feed import Feeding, TrainingSet, Worker
from components.train.objectives.adversarial import FgsmTraining
from components.train.objectives.base import Objective
from components.train.validation import robust_accuracy, validation_accuracy

Row = dict[str, float | int | None]


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
        settings: EpochSettings,
        weight_decay: float,
        val_items: int,
        val_eps: float | None,
        val_steps: int,
        wrap: Callable[[PixelModel], nn.Module] = lambda model: model,
        worker: Worker = Worker(),  # noqa: B008 - frozen
        feeding: Feeding = Feeding(),  # noqa: B008 - frozen
    ) -> None:
        self.model, self.objective, self.settings, self.worker = model, objective, settings, worker
        self.train = TrainingSet(train, synthetic, settings.synthetic_ratio)
        self.val, self.attacked, self.feeding = val, val.take(val_items), feeding
        self.val_eps, self.val_steps = val_eps, val_steps
        self.optimizer = make_optimizer(
            model, learning_rate=settings.learning_rate, weight_decay=weight_decay
        )
        self.wrapped = wrap(model)
        self.history: list[Row] = []

    @property
    def next_epoch(self) -> int:
        return len(self.history)

    def state(self) -> dict[str, Any]:
        """Everything that the next epoch depends on; randomness needs none, it is addressed."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "history": self.history,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.history = list(state["history"])

    def run_epoch(
        self,
        *,
        total: Callable[[Tensor], Tensor] = lambda sums: sums,
        on_step: Callable[[int, int], None] = lambda step, steps: None,
    ) -> Row:
        """Train one epoch and validate; `total` adds the sums of all workers."""
        epoch, began = self.next_epoch, time.perf_counter()
        part = train_epoch(
            self.wrapped,
            self.model,
            self.train,
            self.objective,
            self.optimizer,
            settings=self.settings,
            epoch=epoch,
            worker=self.worker,
            feeding=self.feeding,
            on_step=on_step,
        )
        sums = torch.tensor([part["loss"], part["correct"], part["count"]], dtype=torch.float64)
        loss, correct, count = total(sums).tolist()
        row: Row = {
            "epoch": epoch,
            "lr": part["lr"],
            "eps": self.objective.eps_at(epoch)
            if isinstance(self.objective, FgsmTraining)
            else None,
            "loss": loss / count,
            "train_accuracy": correct / count,
            "val_accuracy": None,
            "val_robust_accuracy": None,
        }
        if self.worker.rank == 0:
            row |= self._validate()
        row["wait_seconds"] = round(part["wait_seconds"], 3)  # this worker's, for data
        row["images_per_second"] = round(part["images_per_second"] * count / part["count"], 1)
        row["seconds"] = round(time.perf_counter() - began, 3)
        self.history.append(row)
        return row

    def _validate(self) -> Row:
        seed = self.settings.seed
        row: Row = {
            "val_accuracy": validation_accuracy(self.model, self.val, self.objective, seed=seed)
        }
        if self.val_eps is not None:
            row["val_robust_accuracy"] = robust_accuracy(
                self.model, self.attacked, eps=self.val_eps, num_steps=self.val_steps, seed=seed
            )
        return row
