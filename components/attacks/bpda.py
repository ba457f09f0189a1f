"""One network judges, another lends its gradient.

Backward pass differentiable approximation (Athalye et al. 2018, "Obfuscated Gradients Give a False
Sense of Security", sec. 4.1): where the gradient of a function is useless, follow that of a
stand-in, evaluated at the same point, and let the function itself say what it answers there.
"""

import torch

from components.core.types import Images, Logits, LogitsFn


def with_gradient_of(stand_in: LogitsFn, *, judge: LogitsFn) -> LogitsFn:
    """The logits of `judge` bit for bit; their Jacobian is that of `stand_in`.

    Any attack that runs on it stops, compares and returns by the answers of `judge`. A pass that
    asks for gradients costs two forward passes.
    """

    def logits_of(x: Images) -> Logits:
        if not (torch.is_grad_enabled() and x.requires_grad):
            return judge(x)
        with torch.no_grad():
            answers = judge(x)
        lent = stand_in(x)
        return answers + (lent - lent.detach())  # the bracket is exactly 0, with a gradient

    return logits_of
