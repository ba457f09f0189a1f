"""Selection of the weights to keep, and early stopping."""

from typing import Any

from torch import Tensor, nn

from components.train.settings import TrainSettings


class Selection:
    """Keeps the weights with the highest validation metric (ties: the first), or the last ones.

    `patience` is the number of epochs allowed without a new best one. The metric is measured at the
    full epsilon from the start, so epochs of a warm-up can be compared with later ones.
    """

    def __init__(self, train: TrainSettings) -> None:
        self.select, self.patience = train.select, train.patience
        self.best_value: float | None = None
        self.best_epoch: int | None = None
        self.best_weights: dict[str, Tensor] | None = None

    @property
    def is_on(self) -> bool:
        """Whether anything depends on validation metrics."""
        return self.select == "best" or self.patience is not None

    def consider(self, value: float, epoch: int, model: nn.Module) -> None:
        """Record the value of a finished epoch and, if it is the best so far, its weights."""
        if self.best_value is not None and value <= self.best_value:
            return
        self.best_value, self.best_epoch = value, epoch
        if self.select == "best":
            weights = model.state_dict()
            self.best_weights = {name: w.detach().cpu().clone() for name, w in weights.items()}

    def given_up(self, epoch: int) -> bool:
        """Whether `patience` epochs have passed without a new best one."""
        if self.patience is None or self.best_epoch is None:
            return False
        return epoch - self.best_epoch >= self.patience

    def state(self) -> dict[str, Any]:
        return {"value": self.best_value, "epoch": self.best_epoch, "weights": self.best_weights}

    def restore(self, state: dict[str, Any]) -> None:
        self.best_value, self.best_epoch = state["value"], state["epoch"]
        self.best_weights = state["weights"]
