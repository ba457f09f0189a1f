"""Which weights of a training are kept, and when there is no point in going on."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from components.core.errors import CasemateError


@dataclass(slots=True)
class Selection:
    """Keeps the weights with the highest validation figure, the first of equals, or the last ones.

    `patience` is how many epochs may pass without a new best one. The figure is measured at the
    full epsilon from the beginning, so epochs of a warm-up can be compared with later ones.
    """

    select: str = "last"
    patience: int | None = None
    best_value: float | None = field(default=None, init=False)
    best_epoch: int | None = field(default=None, init=False)
    best_weights: dict[str, Tensor] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.select not in ("last", "best"):
            raise CasemateError("train.select", self.select, "is unknown; choose last or best")

    @property
    def is_on(self) -> bool:
        """Whether anything depends on validation figures."""
        return self.select == "best" or self.patience is not None

    def consider(self, value: float, epoch: int, model: nn.Module) -> None:
        """Take the figure of a finished epoch and, if they are the best so far, its weights."""
        if self.best_value is not None and value <= self.best_value:
            return
        self.best_value, self.best_epoch = value, epoch
        if self.select == "best":
            weights = model.state_dict()
            self.best_weights = {name: w.detach().cpu().clone() for name, w in weights.items()}

    def given_up(self, epoch: int) -> bool:
        """Whether patience has ended with this epoch."""
        if self.patience is None or self.best_epoch is None:
            return False
        return epoch - self.best_epoch >= self.patience

    def state(self) -> dict[str, Any]:
        return {"value": self.best_value, "epoch": self.best_epoch, "weights": self.best_weights}

    def restore(self, state: dict[str, Any]) -> None:
        self.best_value, self.best_epoch = state["value"], state["epoch"]
        self.best_weights = state["weights"]
