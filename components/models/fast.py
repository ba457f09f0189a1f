"""The same logits of a vision transformer for less work, for attacks that ask again and again.

Two savings, both exact up to rounding: non-overlapping patches are embedded by one matrix product
instead of a strided convolution, whose gradient is slow; and of the last block only the tokens that
the head reads are computed. Networks are admitted by their class, as in `tokens.py`. Weights, state
dict and modules stay as they are, and every pass looks first: where somebody hooks or shadows a
part (factors, masks, gaps, lesions, features), that part runs as timm wrote it.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.nn.functional as F
from timm.layers import Attention, PatchEmbed
from timm.models.beit import Beit
from timm.models.beit import Block as BeitBlock
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva, EvaBlock
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from components.models.attention.shadow import shadowed

# Residual blocks that add attention(norm1(tokens)) and then work on each token by itself.
NARROWABLE = (Block, BeitBlock, EvaBlock)


@contextmanager
def lean(net: nn.Module) -> Iterator[None]:
    """Inside, `net` takes these savings where it can; any other network runs as it is."""
    with ExitStack() as stack:
        for stem in net.modules():
            conv: Any = getattr(stem, "proj", None)
            if type(stem) is PatchEmbed and is_patchwise(conv):
                stack.enter_context(shadowed(conv, "forward", _as_product(conv)))
        if count := num_tokens_read(net):
            block: Any = net.blocks[-1]  # type: ignore[index]
            stack.enter_context(shadowed(block, "forward", _narrowed(block, count)))
        yield


def num_tokens_read(net: Any) -> int:
    """How many leading tokens of the last block reach the head alone; 0: all, or nobody knows."""
    if type(net) not in (VisionTransformer, VisionTransformerDistilled, Beit, Eva):
        return 0
    by_token = net.global_pool == "token" and getattr(net, "attn_pool", None) is None
    if not by_token or type(net.blocks[-1]) not in NARROWABLE:
        return 0
    return 2 if type(net) is VisionTransformerDistilled else 1


def is_patchwise(conv: nn.Module) -> bool:
    """A plain convolution whose windows tile the image."""
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


def _narrowed(block: Any, count: int) -> Callable[..., Tensor]:
    """`block` for its first `count` tokens: all tokens are attended to, only these are computed.

    Norms, factors and MLP are the block's own: it runs on these tokens alone, with an attention
    that has the answer already.
    """
    plain = block.forward
    inner = [part for part in block.modules() if part is not block]

    def is_watched() -> bool:
        return is_hooked(block) or any(is_hooked(p) or "forward" in vars(p) for p in inner)

    def forward(tokens: Tensor, **positions: Any) -> Tensor:
        output: Tensor
        if block.training or is_watched():
            output = plain(tokens, **positions)
            return output
        attended = _attended(block.attn, block.norm1(tokens), count, positions)
        with shadowed(block.attn, "forward", lambda *args, **kwargs: attended):
            output = plain(tokens[:, :count], **positions)
        return output

    return forward


def _attended(attn: Any, tokens: Tensor, count: int, positions: dict[str, Any]) -> Tensor:
    """(B, count, D): what attention gives to the first tokens.

    timm's plain fused attention is asked for their queries only; other kinds answer in full.
    """
    narrow = type(attn) is Attention and type(attn.qkv) is nn.Linear and attn.fused_attn
    if not narrow or attn.gate is not None or positions:
        full: Tensor = attn(tokens, **positions)
        return full[:, :count]
    weight, bias, width = attn.qkv.weight, attn.qkv.bias, attn.attn_dim
    of_queries, of_others = (None, None) if bias is None else (bias[:width], bias[width:])
    rows, heads = len(tokens), (attn.num_heads, attn.head_dim)
    q = F.linear(tokens[:, :count], weight[:width], of_queries).reshape(rows, count, *heads)
    kv = F.linear(tokens, weight[width:], of_others).reshape(rows, -1, 2, *heads)
    q, k, v = (part.transpose(1, 2) for part in (q, *kv.unbind(2)))  # (B, heads, tokens, width)
    mixed = F.scaled_dot_product_attention(attn.q_norm(q), attn.k_norm(k), v)
    narrowed: Tensor = attn.proj_drop(attn.proj(attn.norm(mixed.transpose(1, 2).flatten(2))))
    return narrowed


def is_hooked(part: Any) -> bool:
    """Whether somebody reads or changes what goes in or out; asked in every pass, so no loop."""
    return bool(
        part._forward_hooks
        or part._forward_pre_hooks
        or part._backward_hooks
        or part._backward_pre_hooks
    )
