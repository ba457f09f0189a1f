"""l2 attack on a Gaussian-smoothed classifier: SmoothAdv (Salman et al. 2019, sec. 2.2).

A hard vote has no useful gradient, so the attack increases the loss of the soft smoothed classifier
    J(x') = -log( mean_i softmax(F(x' + sigma * d_i))_y ),   d_i ~ N(0, I),
the logarithm of the mean probability: the mean of the logarithms would attack the average noisy
image instead of the vote.
"""

import math

import torch

from components.attacks.gradients import check_finite, l2_direction
from components.attacks.projections import project_l2
from components.core.evaluations import EVALUATIONS
from components.core.types import LogitsFn


def attack_smoothed_l2(
    logits_of: LogitsFn,
    image: torch.Tensor,
    label: int,
    *,
    eps: float,
    sigma: float,
    num_steps: int,
    num_draws: int,
    step_size: float,
    generator: torch.Generator,
) -> torch.Tensor:
    """The last iterate (C, H, W) of normalised ascent on J, inside the l2 ball and the pixel range.

    Every step uses new draws: the attack could overfit reused ones without changing the vote. Noisy
    images are not clamped, as in certification. The caller decides with its own draws whether the
    vote changed. `eps` = 0 returns `image`. Hold `attack_mode(model)` around the call.
    """
    if num_draws < 1:
        raise ValueError(f"num_draws must be >= 1, got {num_draws}")
    if eps == 0:
        return image
    x = image.detach()[None]
    x_adv = x
    shape = (num_draws, *image.shape)
    for _ in range(num_steps):
        normal = torch.randn(shape, generator=generator, device=generator.device, dtype=image.dtype)
        gradient = _soft_vote_gradient(
            logits_of, x_adv, label, noise=sigma * normal.to(image.device)
        )
        x_adv = project_l2(x_adv + step_size * l2_direction(gradient), center=x, eps=eps)
    return x_adv[0]


def _soft_vote_gradient(
    logits_of: LogitsFn, x: torch.Tensor, label: int, *, noise: torch.Tensor
) -> torch.Tensor:
    """Gradient of J at `x` (1, C, H, W); logsumexp is stable where probabilities underflow."""
    with torch.enable_grad():
        leaf = x.detach().clone().requires_grad_()
        EVALUATIONS.add(len(noise))
        log_prob = logits_of(leaf + noise).log_softmax(dim=1)[:, label]
        loss = math.log(len(noise)) - log_prob.logsumexp(dim=0)
        (gradient,) = torch.autograd.grad(loss, leaf)
    return check_finite(gradient)
