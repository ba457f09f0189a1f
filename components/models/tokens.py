"""Token dropping for vision transformers (Salman et al. 2022, Algorithm 1).

Prefix tokens (class, distillation, registers) and every token with at least one visible pixel are
kept, in raster order, each with its own position. Dropping then equals the full sequence in which
no attention sees the dropped tokens and no pooling counts them. That holds only where nothing but
attention mixes tokens, so networks are accepted by exact class.
"""

from collections.abc import Callable, Sequence
from functools import singledispatch
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import (
    PatchDropout,
    PatchDropoutWithIndices,
    PatchEmbed,
    apply_keep_indices_nlc,
)
from timm.models import checkpoint
from timm.models.beit import Beit
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from components.core.errors import CasemateError
from components.models.attention.shadow import shadowed

DROPPABLE = (VisionTransformer, VisionTransformerDistilled, Beit, Eva)


def check_droppable(net: nn.Module) -> None:
    """Raise an error for networks where removing tokens changes the others beyond attention."""
    if objection := _reason_not_droppable(net):
        raise CasemateError("model.token_policy", "drop", f"{objection}; use token_policy: mask")


def _reason_not_droppable(net: Any) -> str | None:
    if type(net) not in DROPPABLE:  # a subclass may mix tokens in its own way
        return f"needs a plain vision transformer, {type(net).__name__} is not one"
    stem = net.patch_embed
    if type(stem) is not PatchEmbed:
        return (
            f"needs a plain vision transformer, {type(net).__name__} with the stem "
            f"{type(stem).__name__} is not one: its tokens depend on neighbouring pixels"
        )
    ragged = any(side % cell for side, cell in zip(stem.img_size, stem.patch_size, strict=True))
    if ragged or stem.dynamic_img_pad:
        return (
            f"needs an image side that is a multiple of the patch side {stem.patch_size}, without "
            f"padding; {type(net).__name__} got {stem.img_size}"
        )
    if any(isinstance(part, PatchDropout | PatchDropoutWithIndices) for part in net.modules()):
        return f"excludes the patch_drop_rate of {type(net).__name__}, which removes tokens too"
    return None


def patch_size_of(net: nn.Module) -> tuple[int, int]:
    """(height, width) in pixels of the cell behind one token of a droppable network."""
    stem: Any = net.patch_embed
    height, width = stem.patch_size
    return height, width


def visible_tokens(visible: Tensor, patch_size: tuple[int, int]) -> Tensor:
    """(B, N) bool: which tokens of the raster grid hold at least one visible pixel of (B, H, W)."""
    cells = F.max_pool2d(visible[:, None].float(), kernel_size=patch_size, stride=patch_size)
    return cells.flatten(1) > 0


def kept_indices(keep: Tensor) -> Tensor:
    """(B, T) raster indices of the kept tokens; every row must keep equally many, at least one."""
    fewest, most = (int(count) for count in keep.sum(dim=1).aminmax())
    if fewest != most:
        raise ValueError("rows of one batch must keep the same number of tokens")
    if most == 0:
        raise ValueError("no token holds a visible pixel")
    return keep.nonzero()[:, 1].view(-1, most)


def forward_kept(net: nn.Module, images: Tensor, kept: Tensor) -> Tensor:
    """Logits of `net` on its prefix tokens and, row by row, the (B, T) tokens `kept`.

    Every step is timm's own: embed, add positions, gather, then blocks, norm and head.
    """
    if type(net) not in DROPPABLE:
        raise ValueError(f"{type(net).__name__} is not droppable: call check_droppable first")
    stem: Any = net.patch_embed
    tokens, rotations = with_positions(net, stem(images))
    return forward_tokens(net, _gather(net, tokens, kept), kept, rotations)


def forward_tokens(
    net: nn.Module, tokens: Tensor, kept: Tensor, rotations: Tensor | None
) -> Tensor:
    """Logits of (B, P + T, D) tokens that have their positions: blocks, norm and head."""
    features = _features(net, tokens, kept, rotations)
    logits: Tensor = net.forward_head(features)  # type: ignore[operator]
    return logits


@singledispatch
def with_positions(net: nn.Module, patches: Tensor) -> tuple[Tensor, Tensor | None]:
    """(B, P + N, D) prefix tokens and embedded patches with positions; and rotations if rotary."""
    raise ValueError(f"positions of {type(net).__name__} are unknown")


@with_positions.register(VisionTransformer)
def _absolute_positions(net: Any, patches: Tensor) -> tuple[Tensor, Tensor | None]:
    return net._pos_embed(patches), None


@with_positions.register(Eva)
def _rotary_positions(net: Any, patches: Tensor) -> tuple[Tensor, Tensor | None]:
    tokens, rotations = net._pos_embed(patches)
    return tokens, rotations


@with_positions.register(Beit)
def _relative_positions(net: Any, patches: Tensor) -> tuple[Tensor, Tensor | None]:
    tokens = torch.cat([net.cls_token.expand(len(patches), -1, -1), patches], dim=1)
    if net.pos_embed is not None:
        tokens = tokens + net.pos_embed
    return net.pos_drop(tokens), None


@singledispatch
def _features(net: nn.Module, tokens: Tensor, kept: Tensor, rotations: Tensor | None) -> Tensor:
    """Final token features; one implementation per position encoding of timm."""
    raise ValueError(f"the order of blocks of {type(net).__name__} is unknown")


@_features.register(VisionTransformer)
def _absolute_features(net: Any, tokens: Tensor, kept: Tensor, rotations: None) -> Tensor:
    """Positions are added to the tokens: ViT, DeiT, distilled DeiT, DeiT-3, registers."""
    tokens = net.norm_pre(tokens)
    for block in net.blocks:
        tokens = _run(net, block, tokens)
    features: Tensor = net.norm(tokens)
    return features


@_features.register(Eva)
def _rotary_features(net: Any, tokens: Tensor, kept: Tensor, rotations: Tensor | None) -> Tensor:
    """Positions also rotate queries and keys: each kept token needs its own rotation."""
    tokens = net.norm_pre(tokens)
    for block, rotation in zip(net.blocks, _by_block(net, rotations, kept), strict=True):
        tokens = _run(net, block, tokens, rope=rotation)
    features: Tensor = net.norm(tokens)
    return features


@_features.register(Beit)
def _relative_features(net: Any, tokens: Tensor, kept: Tensor, rotations: None) -> Tensor:
    """Positions also bias the scores of token pairs: only its kept rows and columns apply."""
    shared = None if net.rel_pos_bias is None else _pair_bias(net.rel_pos_bias, kept)
    for block in net.blocks:
        tokens = _run(net, _with_pair_bias(block, kept), tokens, shared_rel_pos_bias=shared)
    features: Tensor = net.norm(tokens)
    return features


def _run(net: Any, block: Callable[..., Any], tokens: Tensor, **positions: Tensor | None) -> Tensor:
    """Tokens after one block, with gradient checkpointing if it is enabled."""
    output: Tensor
    if net.grad_checkpointing:
        output = checkpoint(block, tokens, **positions)
    else:
        output = block(tokens, **positions)
    return output


def _gather(net: Any, tokens: Tensor, kept: Tensor) -> Tensor:
    """(B, P + T, D): the P prefix tokens, then the kept ones of (B, P + N, D)."""
    prefix = net.num_prefix_tokens
    tokens = tokens.contiguous()  # without prefix tokens timm passes a transposed view
    index = (kept + prefix)[..., None].expand(-1, -1, tokens.shape[2])
    return torch.cat([tokens[:, :prefix], tokens.gather(1, index)], dim=1)


def _by_block(net: Any, rotations: Tensor | None, kept: Tensor) -> Sequence[Tensor | None]:
    """Sines and cosines of the kept tokens for each block, (B, 1 or heads, T, 2 * head width)."""
    if rotations is None:
        return [None] * len(net.blocks)
    chosen: Tensor = apply_keep_indices_nlc(kept, rotations, kept)
    if net.rope_mixed:  # (B, depth, heads, T, ...): learned per block
        return chosen.unbind(1)
    return [chosen[:, None]] * len(net.blocks)


def _pair_bias(owner: Any, kept: Tensor) -> Tensor:
    """(B, heads, 1 + T, 1 + T) relative position bias of the class token and the kept ones."""
    tokens = F.pad(kept + 1, (1, 0))  # 0: the class token
    pairs = owner.relative_position_index[tokens[:, :, None], tokens[:, None, :]]
    bias: Tensor = owner.relative_position_bias_table[pairs].permute(0, 3, 1, 2)
    return bias.contiguous()


def _with_pair_bias(block: Any, kept: Tensor) -> Callable[..., Any]:
    """`block` with the bias of the kept pairs: timm's attention uses that of the whole grid.

    The bias is replaced in each call, so it also applies when gradient checkpointing recomputes.
    """
    attention = block.attn
    if attention.relative_position_bias_table is None:
        return block  # type: ignore[no-any-return]
    bias = _pair_bias(attention, kept)

    def run(tokens: Tensor, **positions: Tensor | None) -> Any:
        with shadowed(attention, "_get_rel_pos_bias", lambda: bias):
            return block(tokens, **positions)

    return run
