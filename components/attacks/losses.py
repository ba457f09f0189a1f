"""Losses that attacks increase: one value per item, larger = closer to an error.

Values are per item so that a gradient does not depend on its batch; `input_gradient` sums them.

Symbols: z = logits (B, K); y = true class; t = target class; z_(1) >= z_(2) >= ... the sorted
logits; p = softmax(z).
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from components.core.errors import CasemateError
from components.core.types import Labels, Logits

LossFn = Callable[[Logits, Labels], Tensor]  # (B, K), (B,) -> (B,)

# Equal logits make the denominator of DLR zero; a floor changes no other value, an offset would.
DLR_FLOOR = 1e-12


def cross_entropy(logits: Logits, y: Labels) -> Tensor:
    """-log softmax(z)_y, the loss of Madry et al. 2018, sec. 2."""
    return F.cross_entropy(logits, y, reduction="none")


def margin(scores: Logits, y: Labels, *, kappa: float | None = None) -> Tensor:
    """max_{i != y} s_i - s_y, positive exactly when another class has the highest score.

    Of logits it is the untargeted form of f_6 in Carlini & Wagner 2017; of probabilities the
    surrogate of the patch attack and of GAMA. `kappa` clips it from below at -kappa, as some
    published evaluations do; off by default: clipped items have no gradient.
    """
    own = scores.gather(1, y[:, None])
    rivals = scores.scatter(1, y[:, None], float("-inf"))
    lead = rivals.amax(dim=1) - own.squeeze(1)
    return lead if kappa is None else lead.clamp_min(-kappa)


def dlr(logits: Logits, y: Labels) -> Tensor:
    """(max_{i != y} z_i - z_y) / (z_(1) - z_(3)): difference of logits ratio.

    Croce & Hein 2020, "Reliable evaluation of adversarial robustness", eq. 6: shifting or scaling
    the logits leaves it unchanged, so large logits do not make the gradient vanish.
    """
    _require_classes("dlr", logits, minimum=3)
    top = logits.topk(3, dim=1).values
    return margin(logits, y) / (top[:, 0] - top[:, 2]).clamp_min(DLR_FLOOR)


def targeted_dlr(logits: Logits, y: Labels, target: Labels) -> Tensor:
    """(z_t - z_y) / (z_(1) - (z_(3) + z_(4)) / 2): Croce & Hein 2020, eq. 7."""
    _require_classes("targeted dlr", logits, minimum=4)
    top = logits.topk(4, dim=1).values
    spread = top[:, 0] - (top[:, 2] + top[:, 3]) / 2
    gain = logits.gather(1, target[:, None]) - logits.gather(1, y[:, None])
    return gain.squeeze(1) / spread.clamp_min(DLR_FLOOR)


def kl_divergence(logits: Logits, reference: Tensor) -> Tensor:
    """KL(reference || p): the inner loss of TRADES (Zhang et al. 2019, eq. 5).

    `reference` (B, K) are the fixed probabilities of the clean images. The divergence has its
    minimum there, so its gradient is zero: a start must be random.
    """
    return F.kl_div(logits.log_softmax(dim=1), reference, reduction="none").sum(dim=1)


def _require_classes(name: str, logits: Logits, *, minimum: int) -> None:
    num_classes = logits.shape[1]
    if num_classes < minimum:
        remedy = f"are too few: this loss compares the {minimum} largest logits; use ce or margin"
        raise CasemateError(name, f"{num_classes} classes", remedy)
