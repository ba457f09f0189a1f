"""What an attack raises: one value per item, larger = closer to a mistake.

Values stay per item so that no gradient depends on the batch it was computed in; `input_gradient`
sums them.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from components.core.types import Labels, Logits

LossFn = Callable[[Logits, Labels], Tensor]  # (B, K), (B,) -> (B,)


def cross_entropy(logits: Logits, y: Labels) -> Tensor:
    """-log softmax(z)_y, the loss of Madry et al. 2018, sec. 2."""
    return F.cross_entropy(logits, y, reduction="none")


def margin(scores: Logits, y: Labels) -> Tensor:
    """max_{i != y} s_i - s_y, positive exactly when another class leads.

    Of logits it is the untargeted form of f_6 in Carlini & Wagner 2017, not clipped from below: a
    clip would silence confident items. Of probabilities it is the surrogate of the patch attack.
    """
    own = scores.gather(1, y[:, None])
    rivals = scores.scatter(1, y[:, None], float("-inf"))
    return rivals.amax(dim=1) - own.squeeze(1)
