"""Transformer blocks on a processor with fewer passes over memory; the same up to rounding.

A plain timm block becomes four matrix products whose weights oneDNN has laid out for itself, with
bias, GELU and residual sum inside them, two layer norms and the attention. The operators are those
that torch's own compiler emits for such blocks on a CPU; called directly they need no compilation,
which takes minutes, and take any number of rows. Weights and modules stay as they are.
A layout is kept as long as its weights; a change of these (torch counts them) makes it anew.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from timm.layers import Attention, LayerScale, Mlp
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from components.models.attention.shadow import shadowed
from components.models.fast import is_hooked

SHORT = 64  # tokens


@contextmanager
def packed_blocks(net: nn.Module) -> Iterator[None]:
    """Inside, all blocks but the last of `net` run so where they can; `lean` has the last one."""
    blocks: Any = getattr(net, "blocks", ())
    with ExitStack() as stack:
        for block in blocks[:-1]:
            if can_pack(block):
                stack.enter_context(shadowed(block, "forward", _packed(block)))
        yield


def can_pack(block: Any) -> bool:
    """Whether this is a plain block in single precision on a CPU, with nobody looking in.

    The operators have no gradient.
    """
    return (
        type(block) is Block
        and not torch.is_grad_enabled()
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and not block.training
        and all(p.device.type == "cpu" and p.dtype == torch.float32 for p in block.parameters())
        and _is_plain(block.attn, block.mlp)
        and all(type(scale) in (nn.Identity, LayerScale) for scale in (block.ls1, block.ls2))
        and not any(is_hooked(part) or "forward" in vars(part) for part in block.modules())
    )


def _is_plain(attn: Any, mlp: Any) -> bool:
    return (
        type(attn) is Attention
        and attn.fused_attn
        and attn.gate is None
        and type(mlp) is Mlp
        and type(mlp.act) is nn.GELU
        and mlp.act.approximate == "none"
        and type(mlp.norm) is nn.Identity
        and all(type(part) is nn.Linear for part in (attn.qkv, attn.proj, mlp.fc1, mlp.fc2))
    )


@dataclass(frozen=True, slots=True)
class _Layout:
    """Weights of one product as oneDNN wants them, and what they were made of."""

    weight: Tensor
    bias: Tensor | None
    origin: tuple[tuple[int, int], ...]


_layouts: WeakKeyDictionary[nn.Linear, _Layout] = WeakKeyDictionary()


def _layout(linear: nn.Linear, scale: nn.Module | None = None) -> _Layout:
    """Of `linear`, then times the factors of `scale` (LayerScale: they go into the weights)."""
    sources = [*linear.parameters(), *(scale.parameters() if scale else ())]
    counted = not any(part.is_inference() for part in sources)  # else changes would go unseen
    origin = tuple((part.data_ptr(), part._version) for part in sources) if counted else ()
    known = _layouts.get(linear)
    if known is None or known.origin != origin or not counted:
        weight, bias = linear.weight.detach(), linear.bias
        if isinstance(scale, LayerScale):
            weight = weight * scale.gamma[:, None]
            bias = None if bias is None else bias * scale.gamma
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        known = _layouts[linear] = _Layout(packed, bias, origin)
    return known


def _product(rows: Tensor, by: _Layout, then: str = "none") -> Tensor:
    output: Tensor = torch.ops.mkldnn._linear_pointwise(
        rows, by.weight, by.bias, then, [], "none" if then == "gelu" else ""
    )
    return output


def _added(tokens: Tensor, rows: Tensor, by: _Layout) -> Tensor:
    """tokens + the product."""
    output: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
        rows, tokens, by.weight, by.bias, "add"
    )
    return output


def _packed(block: Any) -> Callable[[Tensor], Tensor]:
    attn, mlp = block.attn, block.mlp
    qkv, proj = _layout(attn.qkv), _layout(attn.proj, block.ls1)
    fc1, fc2 = _layout(mlp.fc1), _layout(mlp.fc2, block.ls2)

    def forward(tokens: Tensor) -> Tensor:
        mixed = _product(block.norm1(tokens), qkv).unflatten(2, (3, attn.num_heads, attn.head_dim))
        tokens = _added(tokens, attn.norm(_attended(attn, mixed)), proj)
        return _added(tokens, _product(block.norm2(tokens), fc1, "gelu"), fc2)

    return forward


def _attended(attn: Any, mixed: Tensor) -> Tensor:
    """(B, L, D) of queries, keys and values (B, L, 3, heads, width).

    The fused kernel works in tiles that a few dozen tokens leave half empty: short sequences are
    faster head by head, which also needs no copies.
    """
    plain = type(attn.q_norm) is type(attn.k_norm) is nn.Identity
    if not plain or mixed.shape[1] > SHORT:
        q, k, v = mixed.permute(2, 0, 3, 1, 4).unbind()  # (B, heads, L, width) each
        fused = F.scaled_dot_product_attention(attn.q_norm(q), attn.k_norm(k), v)
        return fused.transpose(1, 2).flatten(2)
    nothing, outputs = mixed.new_empty(1), []
    for q, k, v in (head.unbind(2) for head in mixed.unbind(3)):
        scores = torch.baddbmm(nothing, q, k.transpose(1, 2), beta=0, alpha=attn.scale)
        outputs.append(torch.bmm(scores.softmax(dim=-1), v))
    return torch.cat(outputs, dim=2)
