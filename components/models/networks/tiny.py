"""Transformers of a few thousand weights: the models of the demo and of the tests."""

from dataclasses import dataclass

from timm.models.vision_transformer import VisionTransformer
from timm.models.xcit import Xcit
from torch import nn

from components.core.errors import CasemateError
from components.models.adapt import set_xcit_patch


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of both architectures; fields with a default are options of a recipe."""

    image_size: int
    channels: int
    num_classes: int
    patch_size: int = 4
    embed_dim: int = 64
    depth: int = 4
    num_heads: int = 4

    def for_timm(self) -> dict[str, int]:
        """All sizes but the patch, under timm's names."""
        shared = ("num_classes", "embed_dim", "depth", "num_heads")
        sizes = {name: getattr(self, name) for name in shared}
        return {"img_size": self.image_size, "in_chans": self.channels, **sizes}


def tiny_vit(**options: int) -> nn.Module:
    """A class-token ViT for small images, built from timm's own class."""
    sizes = Sizes(**options)
    if sizes.patch_size < 1:
        raise CasemateError("model.options.patch_size", sizes.patch_size, "must be at least 1")
    net: nn.Module = VisionTransformer(patch_size=sizes.patch_size, **sizes.for_timm())
    return net


def tiny_xcit(*, cls_attn_layers: int = 1, **options: int) -> nn.Module:
    """An XCiT for small images: timm's 8-pixel stem with its first strides set to 1."""
    sizes = Sizes(**options)
    if sizes.patch_size not in (2, 4, 8):
        raise CasemateError("model.options.patch_size", sizes.patch_size, "is not one of 2, 4, 8")
    if sizes.embed_dim % sizes.num_heads:  # timm would fail in the first forward pass only
        raise ValueError("embed_dim is not a multiple of num_heads")
    net = Xcit(patch_size=8, cls_attn_layers=cls_attn_layers, **sizes.for_timm())
    set_xcit_patch(net, sizes.patch_size)
    network: nn.Module = net
    return network
