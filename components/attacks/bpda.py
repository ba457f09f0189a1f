"""BPDA: the logits of one network with the gradient of another.

Backward pass differentiable approximation (Athalye et al. 2018, "Obfuscated Gradients Give a False
Sense of Security", sec. 4.1): where the gradient of a function is useless, follow that of a
differentiable approximation at the same point, and take the value from the function itself.
"""

import torch

from components.core.types import Images, Logits, LogitsFn


def with_gradient_of(backward: LogitsFn, *, forward: LogitsFn) -> LogitsFn:
    """The logits of `forward` bit for bit; their Jacobian is that of `backward`.

    An attack on it succeeds and stops by the logits of `forward` alone. A pass with gradients costs
    two forward passes.
    """

    def logits_of(x: Images) -> Logits:
        if not (torch.is_grad_enabled() and x.requires_grad):
            return forward(x)
        with torch.no_grad():
            logits = forward(x)
        approximation = backward(x)
        return logits + (approximation - approximation.detach())  # exactly 0, with a gradient

    return logits_of
