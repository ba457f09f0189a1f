"""The optimiser, and the update: gradients are unscaled, clipped and applied."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn

from components.core.settings import values_of
from components.models.pixels import PixelModel
from components.train.settings import TrainSettings

REDUCED = {"bfloat16": torch.bfloat16, "float16": torch.float16}

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}  # constructors take the fields of their settings as arguments


def make_optimizer(model: PixelModel, train: TrainSettings) -> torch.optim.Optimizer:
    """The optimiser of a model; biases, norms, class token and position do not decay."""
    options = values_of(train.optimizer)
    make: Any = OPTIMIZERS[options.pop("kind")]
    if model.mean.device.type == "cuda":
        options["fused"] = True  # one kernel for all weights
    optimizer: torch.optim.Optimizer = make(
        _decay_groups(model, train.weight_decay), lr=train.peak_rate, **options
    )
    return optimizer


def _decay_groups(model: PixelModel, weight_decay: float) -> list[dict[str, Any]]:
    """The groups of timm's `param_groups_weight_decay`; importing it loads torch's compiler."""
    exempt = [f"net.{name}" for name in getattr(model.net, "no_weight_decay", set)()]
    groups: dict[float, list[nn.Parameter]] = {0.0: [], weight_decay: []}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            flat = weight.ndim <= 1 or name.endswith(".bias")
            kept = flat or any(fnmatch(name, pattern) for pattern in exempt)
            groups[0.0 if kept else weight_decay].append(weight)
    found = ((weights, decay) for decay, weights in groups.items() if weights)
    return [{"params": weights, "weight_decay": decay} for weights, decay in found]


class Updater:
    """Turns losses into optimiser steps; losses are scaled in fp16 only.

    Half precision rounds small gradients to 0: losses are multiplied before the backward pass, and
    a step whose gradients overflow is skipped (Micikevicius et al. 2018, sec. 3.2).
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        *,
        clip_norm: float | None,
        precision: str,
    ) -> None:
        self.optimizer, self.model, self.clip_norm = optimizer, model, clip_norm
        device = next(model.parameters()).device.type
        self.scaler = torch.amp.GradScaler(device, enabled=precision == "float16")

    @property
    def learning_rate(self) -> float:
        """Learning rate of the last step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def step(self, learning_rate: float) -> None:
        """Apply the gradients and clear them."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        if self.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])


@contextmanager
def autocast_passes(model: nn.Module, precision: str) -> Iterator[None]:
    """Inside the context, the model computes in reduced precision and returns float32 logits.

    Losses, pixels and weights stay float32. A pass in eval mode belongs to an attack: bf16
    keeps the signs of its gradients, fp16 would not (its softmax saturates), so it stays float32.
    Casts are not cached between passes, because the weights may have changed.
    """
    if precision not in REDUCED:
        yield
        return
    patched: Any = model
    plain, dtype = model.forward, REDUCED[precision]

    def forward(*args: Any) -> Tensor:
        device = next(model.parameters()).device.type
        enabled = model.training or dtype is torch.bfloat16
        with torch.autocast(device, dtype=dtype, enabled=enabled):
            logits: Tensor = plain(*args)
        return logits.float()

    patched.forward = forward
    try:
        yield
    finally:
        del patched.forward


def without_sync(wrapped: nn.Module) -> AbstractContextManager[None]:
    """Inside the context, backward passes add to the gradients of this worker only."""
    no_sync = getattr(wrapped, "no_sync", None)
    return nullcontext() if no_sync is None else no_sync()
