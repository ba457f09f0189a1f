"""Learning rate and epsilon as functions of progress: a resumed run needs no schedule state."""

import math


def learning_rate_at(
    step: int, *, peak: float, total_steps: int, warmup_steps: int, floor_ratio: float = 0.01
) -> float:
    """Linear warm-up to `peak`, then a half cosine down to `floor_ratio * peak`."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return peak * (floor_ratio + (1 - floor_ratio) * cosine)


def epsilon_at(epoch: int, *, final: float, warmup_epochs: int) -> float:
    """Linear epsilon warm-up over whole epochs; with one, the first epoch trains on clean images.

    Debenedetti et al. 2022, sec. 4.2; evaluated at the integer epoch, from 0.
    """
    return final * epoch / warmup_epochs if epoch < warmup_epochs else final
