"""Transformer blocks on a CPU with fewer passes over memory; equal up to rounding.

A plain timm block becomes four matrix products with weights in oneDNN's layout and fused bias, GELU
and residual sum, two layer norms and the attention. The operators are those that torch's own
compiler emits for such blocks on a CPU; called directly they need no compilation, which takes
minutes, and accept any number of rows. Weights and modules do not change.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Attention, LayerScale, Mlp
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from components.models.attention.shadow import shadowed
from components.models.fast import Narrowed, Shapes, cut, is_instrumented, num_tokens_read

SHORT = 64  # tokens


@contextmanager
def packed_blocks(net: nn.Module) -> Iterator[None]:
    """Run packed blocks of `net` inside the context, except the last (see `fast_forward`)."""
    blocks: Any = getattr(net, "blocks", ())
    with ExitStack() as stack:
        for block in blocks[:-1]:
            if can_pack(block):
                stack.enter_context(shadowed(block, "forward", _PackedBlock(block)))
        yield


def can_pack(block: Any) -> bool:
    """Whether this is a plain float32 block on a CPU without hooks.

    The operators have no gradient.
    """
    return (
        type(block) is Block
        and not torch.is_grad_enabled()
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and not block.training
        and _is_plain(block.attn, block.mlp)
        and all(type(scale) in (nn.Identity, LayerScale) for scale in (block.ls1, block.ls2))
        and "forward" not in vars(block)
        and not is_instrumented(block)
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
        and all(_is_plain_product(part) for part in (attn.qkv, attn.proj, mlp.fc1, mlp.fc2))
    )


def _is_plain_product(part: nn.Module) -> bool:
    return (
        type(part) is nn.Linear
        and part.weight.device.type == "cpu"
        and part.weight.dtype == torch.float32
    )


@dataclass(frozen=True, slots=True)
class _Layout:
    """Weights of one matrix product in oneDNN's layout."""

    weight: Tensor
    bias: Tensor | None


def _layout(linear: nn.Linear, scale: nn.Module | None = None) -> _Layout:
    """Layout of `linear` times the factors of `scale` (LayerScale, folded into the weights).

    Computed every time, which takes milliseconds: not every change of weights can be detected, so a
    cached layout could be stale.
    """
    weight, bias = linear.weight.detach(), linear.bias
    if isinstance(scale, LayerScale):
        weight = weight * scale.gamma[:, None]
        bias = None if bias is None else bias * scale.gamma
    return _Layout(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()), bias)


def _product(rows: Tensor, by: _Layout, then: str = "none") -> Tensor:
    output: Tensor = torch.ops.mkldnn._linear_pointwise.default(
        rows, by.weight, by.bias, then, [], "none" if then == "gelu" else ""
    )
    return output


def _added(tokens: Tensor, rows: Tensor, by: _Layout) -> Tensor:
    """Sum of `tokens` and the product."""
    output: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
        rows, tokens, by.weight, by.bias, "add"
    )
    return output


class _PackedBlock:
    """Replacement of a block's forward."""

    def __init__(self, block: Any) -> None:
        self.block, attn, mlp = block, block.attn, block.mlp
        self.qkv, self.proj = _layout(attn.qkv), _layout(attn.proj, block.ls1)
        self.fc1, self.fc2 = _layout(mlp.fc1), _layout(mlp.fc2, block.ls2)

    def __call__(self, tokens: Tensor, shapes: Shapes | None = None) -> Tensor:
        """Output for (B, L, D) tokens, or for (N, D): concatenated sequences of `shapes` (B, L)."""
        if shapes is None:
            num, length = tokens.shape[:2]
            return self(tokens.flatten(0, 1), [(num, length)]).view_as(tokens)
        block, attn = self.block, self.block.attn
        tokens = tokens.contiguous()  # without prefix tokens timm passes a transposed view
        # Intermediates have no name: freed at once, their memory stays in the CPU cache.
        tokens = _added(
            tokens,
            attn.norm(_attended(attn, _product(block.norm1(tokens), self.qkv), shapes)),
            self.proj,
        )
        return _added(tokens, _product(block.norm2(tokens), self.fc1, "gelu"), self.fc2)


class PackedNet:
    """A vision transformer from tokens to logits, with its current weights packed."""

    def __init__(self, net: Any) -> None:
        self.net, self.blocks = net, [_PackedBlock(block) for block in net.blocks[:-1]]
        self.last, count = net.blocks[-1], num_tokens_read(net)
        self.narrowed = Narrowed(self.last, count) if count else None
        self.joins_last = self.narrowed is not None and self.narrowed.can_join()

    def __call__(self, groups: Sequence[Tensor]) -> list[Tensor]:
        """Logits of groups of (B, L, D) tokens with positions, each group with its own B and L.

        Everything but attention is per token: the groups share one large product instead of several
        small ones.
        """
        shapes = [(len(tokens), tokens.shape[1]) for tokens in groups]
        joined = self.net.norm_pre(torch.cat([tokens.flatten(0, 1) for tokens in groups]))
        for block in self.blocks:
            joined = block(joined, shapes)
        if self.narrowed and self.joins_last:
            logits = self._logits(self.narrowed.joined(joined, shapes))
            return list(torch.split(logits, [rows for rows, _ in shapes]))
        last = self.narrowed or self.last
        return [self._logits(last(tokens)) for tokens in cut(joined, shapes)]

    def _logits(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.net.forward_head(self.net.norm(tokens))
        return logits


def pack(net: Any) -> PackedNet | None:
    """`net` packed; None unless it is a plain vision transformer whose blocks `can_pack`."""
    plain = type(net) in (VisionTransformer, VisionTransformerDistilled)
    return PackedNet(net) if plain and all(map(can_pack, net.blocks[:-1])) else None


def _attended(attn: Any, mixed: Tensor, shapes: Shapes) -> Tensor:
    """(N, D) attention of (N, 3 D) queries, keys and values.

    A few dozen tokens fill the tiles of the fused kernel only partly: short sequences are faster
    head by head, which also needs no copies.
    """
    output = mixed.new_empty(len(mixed), attn.attn_dim)
    mixed = mixed.view(-1, 3, attn.num_heads, attn.head_dim)
    plain = type(attn.q_norm) is type(attn.k_norm) is nn.Identity
    for part, place in zip(cut(mixed, shapes), cut(output, shapes), strict=True):
        if plain and part.shape[1] <= SHORT:
            _attend_by_head(part, place, scale=attn.scale)
            continue
        q, k, v = part.permute(2, 0, 3, 1, 4).unbind()  # (B, heads, L, width) each
        fused = F.scaled_dot_product_attention(attn.q_norm(q), attn.k_norm(k), v)
        place.copy_(fused.transpose(1, 2).flatten(2))
    return output


def _attend_by_head(mixed: Tensor, output: Tensor, *, scale: float) -> None:
    """Write attention of (B, L, 3, heads, width) queries, keys, values into (B, L, D)."""
    nothing, places = mixed.new_empty(1), output.chunk(mixed.shape[3], dim=2)
    for head, place in zip(mixed.unbind(3), places, strict=True):
        q, k, v = head.unbind(2)
        scores = torch.baddbmm(nothing, q, k.mT, beta=0, alpha=scale)
        place.copy_(torch.bmm(scores.softmax(dim=-1), v))  # faster than bmm into a view
