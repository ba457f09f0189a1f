"""Access to the softmax call inside timm's attention modules.

timm computes it in two ways: `logits.softmax(dim=-1)`, or one fused call that takes queries and
keys. Both are ordinary torch functions, so a torch function mode that is active during the forward
pass of one attention module intercepts exactly this call, after position biases, rotations,
normalisation and window masks.
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
    """Intercepts the softmax of one attention module; subclasses read or change its input."""

    def explicit(self, logits: Tensor) -> Tensor:
        """Logits that replace `logits` in a plain softmax, (B, heads, Nq, Nk)."""
        return logits

    def fused(self, query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor | None:
        """Mask (bool or additive) that replaces `mask` in the fused call."""
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
    """Activate each tap only while its attention module runs."""
    with ExitStack() as stack:
        for module, tap in taps:
            stack.enter_context(shadowed(module, "forward", _listening(module.forward, tap)))
        yield


def _listening(forward: Callable[..., Any], tap: SoftmaxTap) -> Callable[..., Any]:
    def listen(*args: Any, **kwargs: Any) -> Any:
        with tap:
            return forward(*args, **kwargs)

    return listen
