"""Faster forward passes of vision transformers with the same logits, for attacks.

Two savings, both exact up to rounding: non-overlapping patches are embedded by one matrix product
instead of a strided convolution, whose gradient is slow; and of the last block only the tokens that
the head reads are computed. Networks are accepted by class, as in `tokens.py`. Weights, state dict
and modules do not change, and every pass checks for hooks: a part that is hooked or shadowed
(scales, masks, gaps, lesions, features) runs timm's own code.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Attention, PatchEmbed
from timm.models.beit import Beit
from timm.models.beit import Block as BeitBlock
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva, EvaBlock
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from components.models.attention.shadow import shadowed

# Residual blocks that add attention(norm1(tokens)) and then process each token by itself.
NARROWABLE = (Block, BeitBlock, EvaBlock)

Shapes = Sequence[tuple[int, int]]  # (B, L) of concatenated sequences


@contextmanager
def fast_forward(net: nn.Module) -> Iterator[None]:
    """Speed up `net` inside the context where possible; other networks run unchanged."""
    with ExitStack() as stack:
        for stem in net.modules():
            conv: Any = stem.proj if type(stem) is PatchEmbed else None
            if is_patchwise(conv):
                stack.enter_context(shadowed(conv, "forward", _as_product(conv)))
        if count := num_tokens_read(net):
            block: Any = net.blocks[-1]  # type: ignore[index]
            stack.enter_context(shadowed(block, "forward", Narrowed(block, count)))
        yield


def num_tokens_read(net: Any) -> int:
    """Number of leading tokens of the last block that the head reads; 0: all, or unknown."""
    if type(net) not in (VisionTransformer, VisionTransformerDistilled, Beit, Eva):
        return 0
    by_token = net.global_pool == "token" and getattr(net, "attn_pool", None) is None
    if not by_token or type(net.blocks[-1]) not in NARROWABLE:
        return 0
    return 2 if type(net) is VisionTransformerDistilled else 1


def is_patchwise(conv: object) -> bool:
    """Whether this is a plain convolution whose windows tile the image."""
    return (
        type(conv) is nn.Conv2d
        and conv.stride == conv.kernel_size
        and conv.padding in ((0, 0), "valid")
        and conv.dilation == (1, 1)
        and conv.groups == 1
    )


def _as_product(conv: nn.Conv2d) -> Callable[[Tensor], Tensor]:
    plain = conv.forward
    tall, wide = conv.kernel_size

    def forward(images: Tensor) -> Tensor:
        num_items, channels, height, width = images.shape
        if height % tall or width % wide or is_hooked(conv):
            return plain(images)
        cells = images.reshape(num_items, channels, height // tall, tall, width // wide, wide)
        pixels = cells.permute(0, 2, 4, 1, 3, 5).flatten(3)  # (B, h, w, C * tall * wide)
        return F.linear(pixels, conv.weight.flatten(1), conv.bias).permute(0, 3, 1, 2)

    return forward


class Narrowed:
    """Forward pass of `block` that computes its first tokens only; they attend to all tokens.

    Norms, layer scales and MLP are the block's own: it runs on these tokens with its attention
    replaced by the precomputed result.
    """

    def __init__(self, block: Any, count: int) -> None:
        self.block, self.count, self.plain = block, count, block.forward

    def __call__(self, tokens: Tensor, **positions: Any) -> Tensor:
        """Output of the first tokens of (B, L, D)."""
        if self.block.training or is_instrumented(self.block):
            output: Tensor = self.plain(tokens, **positions)
            return output
        attn, normed = self.block.attn, self.block.norm1(tokens)
        rows, length = tokens.shape[:2]
        if _supports_partial_queries(attn) and not positions:
            attended = _first_attended(attn, normed.flatten(0, 1), [(rows, length)], self.count)
        else:
            attended = attn(normed, **positions)[:, : self.count]
        return self._rest(tokens[:, : self.count], attended, **positions)

    def can_join(self) -> bool:
        """Whether `joined` is supported."""
        block = self.block
        return (
            not block.training
            and not is_instrumented(block)
            and _supports_partial_queries(block.attn)
        )

    def joined(self, tokens: Tensor, shapes: Shapes) -> Tensor:
        """Output for (N, D) tokens, concatenated sequences of several shapes."""
        attended = _first_attended(self.block.attn, self.block.norm1(tokens), shapes, self.count)
        first = torch.cat([part[:, : self.count] for part in cut(tokens, shapes)])
        return self._rest(first, attended)

    def _rest(self, first: Tensor, attended: Tensor, **positions: Any) -> Tensor:
        output: Tensor
        with shadowed(self.block.attn, "forward", lambda *args, **kwargs: attended):
            output = self.plain(first, **positions)
        return output


def cut(joined: Tensor, shapes: Shapes) -> list[Tensor]:
    """Split (N, ...) concatenated sequences into (B, L, ...) of each shape."""
    parts = torch.split(joined, [rows * length for rows, length in shapes])
    return [part.view(*shape, *part.shape[1:]) for part, shape in zip(parts, shapes, strict=True)]


def _supports_partial_queries(attn: Any) -> bool:
    """Whether attention can be computed for some queries only: timm's plain fused attention."""
    plain = type(attn) is Attention and type(attn.qkv) is nn.Linear
    return plain and attn.fused_attn and attn.gate is None


def _first_attended(attn: Any, tokens: Tensor, shapes: Shapes, count: int) -> Tensor:
    """(B, count, D): attention output of the first tokens of each sequence in (N, D)."""
    weight, bias, width = attn.qkv.weight, attn.qkv.bias, attn.attn_dim
    of_queries, of_others = (None, None) if bias is None else (bias[:width], bias[width:])
    heads, counts = (attn.num_heads, attn.head_dim), [rows for rows, _ in shapes]
    first = torch.cat([part[:, :count] for part in cut(tokens, shapes)])
    q = F.linear(first, weight[:width], of_queries).view(len(first), count, *heads)
    kv = F.linear(tokens, weight[width:], of_others).view(len(tokens), 2, *heads)
    mixed = []
    for few, others in zip(torch.split(q, counts), cut(kv, shapes), strict=True):
        q, k, v = (part.transpose(1, 2) for part in (few, *others.unbind(2)))  # (B, heads, L, e)
        values = F.scaled_dot_product_attention(attn.q_norm(q), attn.k_norm(k), v)
        mixed.append(values.transpose(1, 2).flatten(2))
    output: Tensor = attn.proj_drop(attn.proj(attn.norm(torch.cat(mixed))))
    return output


def is_instrumented(module: nn.Module) -> bool:
    """Whether `module` or a part of it has hooks, or a part has a shadowed forward."""
    pending = [module]
    while pending:  # nn.Module.modules() takes several times as long
        part = pending.pop()
        if is_hooked(part) or (part is not module and "forward" in vars(part)):
            return True
        pending.extend(inner for inner in part._modules.values() if inner is not None)
    return False


def is_hooked(part: Any) -> bool:
    """Whether a module has hooks on inputs or outputs; called in every pass, hence no loop."""
    return bool(
        part._forward_hooks
        or part._forward_pre_hooks
        or part._backward_hooks
        or part._backward_pre_hooks
    )
