"""Token dropping for vision transformers (Salman et al. 2022, Algorithm 1).

Kept are the prefix tokens and every token with at least one visible pixel, in raster order, each
with its own position embedding.
"""

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from components.core.errors import CasemateError


def check_droppable(net: nn.Module) -> None:
    """Refuse networks whose tokens cannot be removed without changing what the others see."""
    if not isinstance(net, VisionTransformer):
        raise CasemateError(
            "model.token_policy",
            "drop",
            f"needs a plain vision transformer, {type(net).__name__} is none; "
            "use token_policy: mask",
        )


def visible_tokens(visible: Tensor, patch_size: tuple[int, int]) -> Tensor:
    """(B, N) bool: which tokens of the raster grid hold at least one visible pixel of (B, H, W)."""
    cells = F.max_pool2d(visible[:, None].float(), kernel_size=patch_size, stride=patch_size)
    return cells.flatten(1) > 0


def kept_indices(keep: Tensor) -> Tensor:
    """(B, T) raster indices of the kept tokens; every row must keep equally many."""
    counts = keep.sum(dim=1)
    if int(counts.min()) != int(counts.max()):
        raise ValueError("rows of one batch must keep the same number of tokens")
    return keep.nonzero()[:, 1].view(keep.shape[0], -1)


def forward_kept(net: VisionTransformer, images: Tensor, kept: Tensor) -> Tensor:
    """Logits of `net` on the kept tokens only: embed, add positions, gather, then the blocks."""
    tokens = net._pos_embed(net.patch_embed(images)).contiguous()
    prefix = net.num_prefix_tokens
    index = (kept + prefix)[..., None].expand(-1, -1, tokens.shape[2])
    tokens = torch.cat([tokens[:, :prefix], tokens.gather(1, index)], dim=1)
    features = net.norm(net.blocks(net.norm_pre(tokens)))
    logits: Tensor = net.forward_head(features)
    return logits
