"""Architectures by name, all through timm: the tiny models of the demo and anything timm knows."""

from collections.abc import Callable, Mapping
from typing import Any

import timm
from timm.models.vision_transformer import VisionTransformer
from timm.models.xcit import Xcit
from torch import nn

from components.core.errors import CasemateError


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
    if patch_size < 1 or image_size % patch_size:  # timm would leave the last columns unseen
        raise CasemateError(
            "model.options.patch_size", patch_size, f"does not divide the image side {image_size}"
        )
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
    """An XCiT for small images: timm's 8-pixel stem with its first strides set to 1.

    Each stride-2 convolution turned into stride 1 halves the patch (8 -> 4 -> 2), weights unchanged
    (Debenedetti et al. 2022, CIFAR adaptation of the stem).
    """
    if patch_size not in (2, 4, 8):
        raise CasemateError("model.options.patch_size", patch_size, "is not one of 2, 4, 8")
    if embed_dim % num_heads:  # timm would notice in the first forward pass only
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
    stem = net.patch_embed
    convs = [layer for layer in stem.proj.modules() if isinstance(layer, nn.Conv2d)]
    for conv in convs[: {8: 0, 4: 1, 2: 2}[patch_size]]:
        conv.stride = (1, 1)
    stem.patch_size = patch_size
    stem.num_patches = (image_size // patch_size) ** 2
    network: nn.Module = net
    return network


TINY: Mapping[str, Callable[..., nn.Module]] = {"tiny_vit": tiny_vit, "tiny_xcit": tiny_xcit}


def build_network(
    architecture: str,
    *,
    image_size: int,
    channels: int,
    num_classes: int,
    options: Mapping[str, Any],
) -> nn.Module:
    """The bare network for normalised images of side `image_size`."""
    arguments: dict[str, Any]
    if architecture in TINY:
        make: Callable[..., nn.Module] = TINY[architecture]
        arguments = {"channels": channels, "num_classes": num_classes, "image_size": image_size}
    elif timm.is_model(architecture):
        make = timm.create_model
        arguments = {"model_name": architecture, "in_chans": channels, "num_classes": num_classes}
        if timm.get_pretrained_cfg(architecture).fixed_input_size:  # positions belong to a size
            arguments["img_size"] = image_size
    else:
        close = sorted(TINY) + timm.list_models(f"{architecture.split('_')[0]}*")[:5]
        raise CasemateError(
            "model.architecture", architecture, f"is unknown here and to timm; for example {close}"
        )
    for key in options.keys() & arguments.keys():
        raise CasemateError(
            f"model.options.{key}", options[key], "follows from the data; remove it"
        )
    try:
        return make(**arguments, **options)
    except (TypeError, AssertionError, ValueError) as error:
        raise CasemateError(
            "model.options", dict(options), f"do not fit {architecture} at {image_size}px: {error}"
        ) from error
