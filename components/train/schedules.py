"""Learning rate and epsilon as functions of progress: a resumed run needs no schedule state."""

import math
from typing import Literal, NamedTuple

REFERENCE_BATCH = 512  # learning rates that scale with the batch size refer to this one
SAFE_RATE = 4e-3  # scaled rates reach it only for batches beyond 4096


class TrainingSpan(NamedTuple):
    """Length of a training and of its warm-up."""

    epochs: int
    warmup_epochs: int
    steps_per_epoch: int

    @property
    def warmup_steps(self) -> int:
        return self.warmup_epochs * self.steps_per_epoch


def warmup_rate(step: int, *, peak: float, start: float | None, num_steps: int) -> float:
    """Linear warm-up from `start` to `peak`; without a start, `num_steps` equal rises from 0."""
    if start is None:
        return peak * (step + 1) / num_steps
    return start + (peak - start) * step / num_steps


def cosine_rate(
    step: int, *, peak: float, first_step: int, last_step: int, floor_ratio: float
) -> float:
    """Half a cosine from `peak` down to `floor_ratio * peak`, where it stays.

    Loshchilov & Hutter 2017, eq. 5, without restarts.
    """
    progress = (step - first_step) / max(1, last_step - first_step)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return peak * (floor_ratio + (1 - floor_ratio) * cosine)


def peak_rate(
    rate: float, *, batch_size: int, rule: Literal["absolute", "linear", "sqrt"]
) -> float:
    """The rate as written, or scaled from a batch of 512 to this one.

    `linear`: Goyal et al. 2017, sec. 2.1; `sqrt` keeps the noise of adaptive methods.
    """
    ratio = batch_size / REFERENCE_BATCH
    factors = {"absolute": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}
    return rate * factors[rule]


def epsilon_at(
    epoch: float,
    *,
    final: float,
    warmup_epochs: int,
    zero_epochs: int,
    shape: Literal["linear", "sine"],
) -> float:
    """Epsilon after this many epochs: 0 at first, a linear or a sine rise, then the final value.

    Debenedetti et al. 2022, sec. 4.2; at whole epochs, the first one trains on clean images.
    The rise begins after `zero_epochs` and ends at `warmup_epochs`, without a jump.
    """
    if epoch >= warmup_epochs:
        return final
    if epoch < zero_epochs:
        return 0.0
    past, rise = epoch - zero_epochs, warmup_epochs - zero_epochs
    if shape == "linear":
        return final * past / rise
    return 0.5 * final * (1 + math.sin(math.pi * (past / rise - 0.5)))
