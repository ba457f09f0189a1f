"""Learning rate and epsilon as functions of progress: a resumed run needs no schedule state."""

import math
from dataclasses import dataclass

from components.core.errors import CasemateError

REFERENCE_BATCH = 512  # learning rates that follow the batch are written for this one
SAFE_RATE = 4e-3  # rules that follow the batch lead here only by batches beyond 4096


@dataclass(frozen=True, slots=True)
class RateSchedule:
    """The shape of the learning rate after its warm-up, in epochs of the whole training.

    `cosine` falls to the floor and rests there for the last `cooldown_epochs`; `step` multiplies
    by `gamma` at every milestone; `constant` stays.
    """

    kind: str = "cosine"
    warmup_start: float | None = None  # None: the first of equal rises from 0
    floor: float | None = None  # None: a hundredth of the peak
    cooldown_epochs: int = 0
    gamma: float = 0.1
    milestones: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ("cosine", "step", "constant"):
            remedy = "is unknown; choose cosine, step or constant"
            raise CasemateError("train.schedule.kind", self.kind, remedy)

    def at(
        self, step: int, *, peak: float, epochs: int, warmup_epochs: int, steps_per_epoch: int
    ) -> float:
        """The rate of a step of the whole training, counted from 0."""
        warmup_steps = warmup_epochs * steps_per_epoch
        if step < warmup_steps and self.warmup_start is not None:
            return self.warmup_start + (peak - self.warmup_start) * step / warmup_steps
        if step < warmup_steps or self.kind == "cosine":
            return learning_rate_at(
                step,
                peak=peak,
                total_steps=(epochs - self.cooldown_epochs) * steps_per_epoch,
                warmup_steps=warmup_steps,
                floor_ratio=0.01 if self.floor is None else self.floor / peak,
            )
        passed = sum(milestone <= step // steps_per_epoch for milestone in self.milestones)
        return peak * self.gamma**passed


def learning_rate_at(
    step: int, *, peak: float, total_steps: int, warmup_steps: int, floor_ratio: float = 0.01
) -> float:
    """Linear warm-up to `peak`, then a half cosine down to `floor_ratio * peak`.

    Loshchilov & Hutter 2017, eq. 5, without restarts.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return peak * (floor_ratio + (1 - floor_ratio) * cosine)


def peak_rate(rate: float, *, batch_size: int, rule: str = "absolute") -> float:
    """The peak as written, or as it grows from a batch of 512 to this one.

    `linear`: Goyal et al. 2017, sec. 2.1; `sqrt` keeps the noise of adaptive methods.
    """
    ratio = batch_size / REFERENCE_BATCH
    if rule == "absolute":
        return rate
    if rule == "linear":
        return rate * ratio
    if rule == "sqrt":
        return rate * math.sqrt(ratio)
    raise CasemateError("train.rate_rule", rule, "is unknown; choose absolute, linear or sqrt")


def epsilon_at(
    epoch: float,
    *,
    final: float,
    warmup_epochs: int,
    zero_epochs: int = 0,
    shape: str = "linear",
) -> float:
    """Epsilon after so many epochs: 0 at first, a linear or a sine rise, then the final value.

    Debenedetti et al. 2022, sec. 4.2; asked at whole epochs, the first one trains on clean images.
    The rise begins after `zero_epochs` and ends at `warmup_epochs`, without a jump.
    """
    if shape not in ("linear", "sine"):
        raise CasemateError("train.objective.eps_shape", shape, "is unknown; choose linear or sine")
    if epoch >= warmup_epochs:
        return final
    if epoch < zero_epochs:
        return 0.0
    past, rise = epoch - zero_epochs, warmup_epochs - zero_epochs
    if shape == "linear":
        return final * past / rise
    return 0.5 * final * (1 + math.sin(math.pi * (past / rise - 0.5)))
