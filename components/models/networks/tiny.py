"""Transformers of a few thousand weights: the models of the demo and of the tests."""

from timm.models.vision_transformer import VisionTransformer
from timm.models.xcit import Xcit
from torch import nn

from components.core.errors import CasemateError
from components.models.adapt import set_xcit_patch


def tiny_vit(
    *,
    image_size: int,
    channels: int,
    num_classes: int,
    patch_size: int = 4,
    embed_dim: int = 64,
    depth: int = 4,
    num_heads: int = 4,
) -> nn.Module:
    """A class-token ViT for small images, built from timm's own class."""
    if patch_size < 1:
        raise CasemateError("model.options.patch_size", patch_size, "must be at least 1")
    net: nn.Module = VisionTransformer(
        img_size=image_size,
        patch_size=patch_size,
        in_chans=channels,
        num_classes=num_classes,
        embed_dim=embed_dim,
        depth=depth,
        num_heads=num_heads,
    )
    return net


def tiny_xcit(
    *,
    image_size: int,
    channels: int,
    num_classes: int,
    patch_size: int = 4,
    embed_dim: int = 64,
    depth: int = 4,
    num_heads: int = 4,
    cls_attn_layers: int = 1,
) -> nn.Module:
    """An XCiT for small images: timm's 8-pixel stem with its first strides set to 1."""
    if patch_size not in (2, 4, 8):
        raise CasemateError("model.options.patch_size", patch_size, "is not one of 2, 4, 8")
    if embed_dim % num_heads:  # timm would fail in the first forward pass only
        raise ValueError("embed_dim is not a multiple of num_heads")
    net = Xcit(
        img_size=image_size,
        patch_size=8,
        in_chans=channels,
        num_classes=num_classes,
        embed_dim=embed_dim,
        depth=depth,
        num_heads=num_heads,
        cls_attn_layers=cls_attn_layers,
    )
    set_xcit_patch(net, patch_size)
    network: nn.Module = net
    return network
