"""Residual blocks and softmax attention modules of a timm network.

Types are matched exactly: a class that is not in the tables below may compute something else under
the same names, so it is rejected by name instead of being treated like a similar class.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from timm.layers import Attention, AttentionRope
from timm.models.beit import Attention as BeitAttention
from timm.models.beit import Beit
from timm.models.beit import Block as BeitBlock
from timm.models.cait import (
    Cait,
    ClassAttn,
    LayerScaleBlock,
    LayerScaleBlockClassAttn,
    TalkingHeadAttn,
)
from timm.models.eva import Eva, EvaAttention, EvaBlock, EvaBlockPostNorm
from timm.models.levit import Attention as LevitAttention
from timm.models.levit import AttentionDownsample, Levit, LevitBlock, LevitDownsample
from timm.models.swin_transformer import SwinTransformer, SwinTransformerBlock, WindowAttention
from timm.models.vision_transformer import (
    Block,
    ParallelThingsBlock,
    ResPostBlock,
    VisionTransformer,
)
from timm.models.xcit import XCA, ClassAttentionBlock, XCABlock, Xcit
from torch import nn

from components.core.errors import CasemateError

# Family: names of its blocks. Registration order is execution order in all of them.
FAMILIES: Mapping[type[nn.Module], str] = {
    VisionTransformer: r"blocks\.\d+",  # ViT and DeiT, distilled too
    Cait: r"(blocks|blocks_token_only)\.\d+",
    Xcit: r"(blocks|cls_attn_blocks)\.\d+",
    SwinTransformer: r"layers\.\d+\.blocks\.\d+",
    Levit: r"stages\.\d+\.(downsample|blocks\.\d+)",
    Beit: r"blocks\.\d+",
    Eva: r"blocks\.\d+",
}
WORKING = "ViT, DeiT, CaiT, XCiT, Swin, LeViT, BEiT, Eva"

KINDS: Mapping[type[nn.Module], str] = {
    Attention: "tokens",
    AttentionRope: "tokens",
    BeitAttention: "tokens",
    EvaAttention: "tokens",
    TalkingHeadAttn: "talking_heads",
    ClassAttn: "class",
    XCA: "channels",  # the softmax runs over channels, not tokens
    WindowAttention: "windows",
    LevitAttention: "grid",
    AttentionDownsample: "grid",
}


@dataclass(frozen=True, slots=True)
class Layout:
    """Parts of a type of block; paths are relative to the block."""

    branches: Mapping[str, str]  # branch: pattern of the modules whose zero output removes it
    attention: str = "attn"  # pattern of its softmax attention modules
    stream: int | None = 0  # which argument the block adds to; None: it cannot be removed


_PLAIN = {"attn": "attn", "mlp": "mlp"}
# A norm turns zero into its bias: only the part after the norm can be zeroed.
_POST_NORM = {"attn": "drop_path1", "mlp": "drop_path2"}

LAYOUTS: Mapping[type[nn.Module], Layout] = {
    Block: Layout(_PLAIN),
    ResPostBlock: Layout(_POST_NORM),
    ParallelThingsBlock: Layout(
        {"attn": r"attns\.\d+\.attn", "mlp": r"ffns\.\d+\.mlp"}, attention=r"attns\.\d+\.attn"
    ),
    BeitBlock: Layout(_PLAIN),
    EvaBlock: Layout(_PLAIN),
    EvaBlockPostNorm: Layout(_POST_NORM),
    LayerScaleBlock: Layout(_PLAIN),
    LayerScaleBlockClassAttn: Layout(_PLAIN, stream=1),  # (patches, class token)
    XCABlock: Layout({**_PLAIN, "local": "local_mp"}),
    ClassAttentionBlock: Layout({}),  # adds normed patch tokens: not a sum of branches
    SwinTransformerBlock: Layout(_PLAIN),
    LevitBlock: Layout(_PLAIN),
    # Fewer tokens leave than enter: only the MLP after its attention is a residual branch.
    LevitDownsample: Layout({"mlp": "mlp"}, attention="attn_downsample", stream=None),
}


@dataclass(frozen=True, slots=True, eq=False)
class BlockSite:
    """One residual block: `net.get_submodule(name)` is `module`."""

    name: str
    module: nn.Module
    layout: Layout

    def parts(self, pattern: str) -> list[tuple[str, nn.Module]]:
        """Sub-modules whose path inside the block matches."""
        named = self.module.named_modules()
        return [(path, part) for path, part in named if re.fullmatch(pattern, path)]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSite:
    """One softmax attention module; `kind` is what its softmax runs over, see `KINDS`."""

    name: str
    kind: str
    num_heads: int
    module: nn.Module


def blocks_of(net: nn.Module) -> list[BlockSite]:
    """The residual blocks of a network in execution order."""
    pattern = next((FAMILIES[family] for family in FAMILIES if isinstance(net, family)), None)
    if pattern is None:
        raise CasemateError(
            "model.architecture",
            type(net).__name__,
            f"gives no access to blocks and attention; bare networks that do: {WORKING}",
        )
    sites = []
    for name, module in net.named_modules():
        if not re.fullmatch(pattern, name) or isinstance(module, nn.Identity):
            continue
        if type(module) not in LAYOUTS:
            raise _unknown(name, module)
        sites.append(BlockSite(name, module, LAYOUTS[type(module)]))
    return sites


def attention_of(net: nn.Module, names: Collection[str] | None = None) -> list[AttentionSite]:
    """Softmax attention modules in execution order, class attention included; all, or `names`."""
    sites = []
    for block in blocks_of(net):
        for path, module in block.parts(block.layout.attention):
            name = f"{block.name}.{path}"
            if type(module) not in KINDS:
                raise _unknown(name, module)
            attn: Any = module
            _check_scale(name, attn)
            sites.append(AttentionSite(name, KINDS[type(module)], attn.num_heads, module))
    pool = getattr(net, "attn_pool", None)
    if pool is not None:  # a softmax that would be ignored silently
        raise _unknown("attn_pool", pool)
    known = [site.name for site in sites]
    if names is not None and (foreign := sorted(set(names) - set(known))):
        raise ValueError(f"{foreign[0]} is not an attention module; there are {known}")
    return [site for site in sites if names is None or site.name in names]


def check_patchable(net: nn.Module) -> None:
    """Reject networks that recompute passes after a temporary change has ended."""
    check_uncompiled(net)
    for name, module in net.named_modules():
        if getattr(module, "grad_checkpointing", False):
            raise CasemateError(
                "model.architecture",
                type(net).__name__,
                f"recomputes {name or 'itself'} in the backward pass, when the change has ended; "
                "switch gradient checkpointing off",
            )


def check_uncompiled(net: nn.Module) -> None:
    """Reject compiled networks: compiled code does not call new hooks."""
    for name, module in net.named_modules():
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            raise CasemateError(
                "model.architecture",
                type(net).__name__,
                f"is compiled at {name or 'its root'} and would ignore this; compile it later",
            )


def _unknown(name: str, module: nn.Module) -> CasemateError:
    return CasemateError(
        "model.architecture",
        type(module).__name__,
        f"at {name} is a layer without access; known are the layers of {WORKING}",
    )


def _check_scale(name: str, attn: Any) -> None:
    """Reject a changed `scale`: timm's fused path takes 1/sqrt(d) from the shape and ignores it."""
    if not getattr(attn, "fused_attn", False) or not hasattr(attn, "scale"):
        return
    if isinstance(attn, ClassAttn):
        width = attn.q.out_features
    elif attn.qkv is None:
        width = attn.q_proj.out_features
    else:
        width = attn.qkv.out_features // 3
    if abs(attn.scale * (width / attn.num_heads) ** 0.5 - 1) > 1e-6:
        raise CasemateError(
            f"{name}.scale",
            attn.scale,
            "has no effect under fused attention; use components.models.attention.scaling",
        )
