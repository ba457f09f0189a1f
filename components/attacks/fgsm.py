"""The training attack: one or two large sign steps from a random start.

Wong et al. 2020, Algorithm 3; step sizes 1.5 eps (one step) and 0.75 eps (two steps) as in the
published code of Debenedetti et al. 2023, "A Light Recipe to Train Robust Vision Transformers".
"""

from torch import Tensor

from components.attacks.gradients import input_gradient
from components.attacks.projections import linf_bounds
from components.core.types import Images, Labels, LogitsFn

START_OFFSET = 1e-5  # numerical stability constant of the same code; the projection follows it


def fgsm(
    logits_of: LogitsFn,
    x: Images,
    y: Labels,
    *,
    eps: float,
    step_size: float,
    num_steps: int,
    starts: Tensor,
) -> Images:
    """The last iterate of sign-gradient ascent inside the l-inf ball, from `x + eps * starts`.

    `eps` = 0, the first epoch of a warm-up, returns `x` itself: no model call and no random number,
    although the offset alone would move it. `step_size` may exceed `eps`: warm-up keeps the final
    step size and the projection keeps it legal. Hold `attack_mode(model)` around the call.
    """
    if eps == 0:
        return x
    low, high = linf_bounds(x, eps=eps)
    x_adv = (x + eps * starts.to(x) + START_OFFSET).clamp(low, high)
    for _ in range(num_steps):
        gradient = input_gradient(logits_of, x_adv, y).gradient
        x_adv = (x_adv + step_size * gradient.sign()).clamp(low, high)
    return x_adv
