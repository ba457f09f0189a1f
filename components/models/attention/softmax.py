"""The moment when attention logits become weights, seen from outside a timm module.

timm writes this moment in two ways: `logits.softmax(dim=-1)`, or one fused call that takes queries
and keys. Both are ordinary torch functions, so a torch function mode that is active during the
forward pass of one attention module meets exactly the call that counts, with position biases,
rotations, normalisation and window masks already inside.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from components.models.attention.shadow import shadowed

SOFTMAX = (torch.softmax, torch.Tensor.softmax, F.softmax)


class SoftmaxTap(TorchFunctionMode):
    """Meets the softmax of one attention module; a subclass changes or reads what goes in."""

    def explicit(self, logits: Tensor) -> Tensor:
        """The logits that a plain softmax shall get instead of `logits`, (B, heads, Nq, Nk)."""
        return logits

    def fused(self, query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor | None:
        """The mask that the fused call shall get instead of `mask` (bool or additive)."""
        return mask

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in SOFTMAX:
            return func(self.explicit(args[0]), *args[1:], **kwargs)
        if func is F.scaled_dot_product_attention:
            query, key, value = args  # timm passes everything else by name
            mask = kwargs.pop("attn_mask", None)
            scale = kwargs.get("scale") or query.shape[-1] ** -0.5
            mask = self.fused(query, key, mask, scale)
            return func(query, key, value, attn_mask=mask, **kwargs)
        return func(*args, **kwargs)


@contextmanager
def tapped(taps: Iterable[tuple[nn.Module, SoftmaxTap]]) -> Iterator[None]:
    """Each tap listens while its attention module runs, and only then."""
    with ExitStack() as stack:
        for module, tap in taps:
            stack.enter_context(shadowed(module, "forward", _listening(module.forward, tap)))
        yield


def _listening(forward: Callable[..., Any], tap: SoftmaxTap) -> Callable[..., Any]:
    def listen(*args: Any, **kwargs: Any) -> Any:
        with tap:
            return forward(*args, **kwargs)

    return listen
