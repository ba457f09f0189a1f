"""Noise levels of the schedules that recipes name, without torch and diffusers."""

import math


def certain_levels(name: str, num_timesteps: int) -> tuple[float, float] | None:
    """First and last sigma that a schedule certainly covers; None: not known in advance.

    The formulas of `Diffusion.named` without diffusers, which takes a second to import, with a
    margin of one percent at both ends.
    """
    steps = range(num_timesteps)
    if name == "linear":  # Ho et al. 2020
        betas = [1e-4 + (0.02 - 1e-4) * t / (num_timesteps - 1) for t in steps]
    elif name == "cosine":  # Nichol & Dhariwal 2021, eq. 17
        signal = [_cosine(t / num_timesteps) for t in range(num_timesteps + 1)]
        betas = [min(1 - signal[t + 1] / signal[t], 0.999) for t in steps]
    else:
        return None
    last = math.prod(1 - beta for beta in betas)
    low, high = (math.sqrt((1 - abar) / abar) / 2 for abar in (1 - betas[0], last))
    return 1.01 * low, 0.99 * high


def _cosine(time: float) -> float:
    return math.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2
