"""Architectures by name: all that timm knows, variants of timm's, and a few networks of our own."""

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

import timm
from timm.layers import PatchEmbed, to_2tuple
from timm.models.xcit import ConvPatchEmbed
from torch import nn

from components.core.errors import CasemateError
from components.models.adapt import set_xcit_patch
from components.models.networks.preact import preact_resnet18, wrn_28_10
from components.models.networks.tiny import tiny_vit, tiny_xcit
from components.models.networks.unet import tiny_unet, unet

OWN: Mapping[str, Callable[..., nn.Module]] = {
    "tiny_vit": tiny_vit,
    "tiny_xcit": tiny_xcit,
    "preact_resnet18": preact_resnet18,
    "wrn_28_10": wrn_28_10,
}
# Networks that estimate images: of noisy ones and of their noise level, not of images alone.
DENOISERS: Mapping[str, Callable[..., nn.Module]] = {"tiny_unet": tiny_unet, "unet": unet}
# Names that timm lacks, as an architecture of timm and the options that make the difference.
VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "cait_s12_224": ("cait_s24_224", {"depth": 12, "init_values": 1.0}),
    "resnet50_gelu": ("resnet50", {"act_layer": "gelu"}),
    "vit_tiny_patch32_224": ("vit_tiny_patch16_224", {"patch_size": 32}),
    "xcit_medium_12_p16_224": ("xcit_small_12_p16_224", {"embed_dim": 512}),
    "xcit_medium_12_p8_224": ("xcit_small_12_p8_224", {"embed_dim": 512}),
    "xcit_large_12_p16_224": ("xcit_small_12_p16_224", {"embed_dim": 768, "num_heads": 16}),
    "xcit_large_12_p8_224": ("xcit_small_12_p8_224", {"embed_dim": 768, "num_heads": 16}),
}
WEIGHT_OPTIONS = ("pretrained", "checkpoint_path")  # timm's; building a network fetches nothing

COUNTS = (
    *("depth", "depths", "layers", "cls_attn_layers", "embed_dim", "channels", "widths"),
    *("num_heads", "patch_size", "stem_patch", "window_size"),
)  # options that are at least 1; none is negative


def build_network(
    architecture: str,
    *,
    image_size: int,
    channels: int,
    num_classes: int,
    options: Mapping[str, Any],
) -> nn.Module:
    """The bare network for normalised images of side `image_size`, with fresh weights.

    `options` go to the architecture's own maker, except `stem_patch`: an XCiT's patch side, smaller
    than the one it was designed with.
    """
    base, variant = VARIANTS.get(architecture, (architecture, {}))
    arguments: dict[str, Any]
    if own := OWN.get(base) or DENOISERS.get(base):
        make: Callable[..., nn.Module] = own
        arguments = {"channels": channels, "num_classes": num_classes, "image_size": image_size}
    elif timm.is_model(base):
        make = timm.create_model
        arguments = {"model_name": base, "in_chans": channels, "num_classes": num_classes}
        if timm.get_pretrained_cfg(base).fixed_input_size:  # positions belong to a size
            arguments["img_size"] = image_size
    else:
        raise _unknown(architecture)
    _check_options(options, taken=arguments)
    chosen = {**variant, **options}
    stem_patch = chosen.pop("stem_patch", None)
    try:
        net = make(**arguments, **chosen)
    except (TypeError, AssertionError, ValueError, ZeroDivisionError) as error:
        raise CasemateError(
            "model.options", dict(options), f"do not fit {architecture} at {image_size}px: {error}"
        ) from error
    if stem_patch is not None:
        set_xcit_patch(net, stem_patch)
    _check_patches(net, image_size)
    return net


def is_known(architecture: str) -> bool:
    """Whether `build_network` can build a classifier of that name."""
    return architecture in OWN or architecture in VARIANTS or bool(timm.is_model(architecture))


def check_known(architecture: str) -> None:
    """Refuse a name that no network here has, without building one."""
    base, _ = VARIANTS.get(architecture, (architecture, {}))
    if not (base in OWN or base in DENOISERS or timm.is_model(base)):
        raise _unknown(architecture)


def _unknown(architecture: str) -> CasemateError:
    family = architecture.split("_")[0]
    close = [*OWN, *(name for name in VARIANTS if name.startswith(family))]
    close += timm.list_models(f"{family}*")[:5]
    return CasemateError(
        "model.architecture", architecture, f"is unknown here and to timm; for example {close}"
    )


def _check_options(options: Mapping[str, Any], *, taken: Mapping[str, Any]) -> None:
    for key, value in options.items():
        if key in taken:
            raise CasemateError(f"model.options.{key}", value, "follows from the data; remove it")
        if key in WEIGHT_OPTIONS:
            raise CasemateError(
                f"model.options.{key}", value, "is no option here; use model.pretrained"
            )
        _check_number(key, value)


def _check_number(key: str, value: Any) -> None:
    """Refuse what timm would build without a word: a network of no blocks, a rate above 1."""
    for number in value if isinstance(value, list | tuple) else [value]:
        if isinstance(number, bool) or not isinstance(number, int | float):
            continue
        if not isfinite(number):
            raise CasemateError(f"model.options.{key}", value, "is not a finite number")
        if key.endswith("_rate") and not 0 <= number < 1:
            raise CasemateError(f"model.options.{key}", value, "is no rate; it is in [0, 1)")
        if number < (least := 1 if key in COUNTS else 0):
            raise CasemateError(f"model.options.{key}", value, f"must be at least {least}")


def _check_patches(net: nn.Module, image_size: int) -> None:
    """Refuse images that patches do not tile: timm would leave their last columns unseen."""
    embed = getattr(net, "patch_embed", None)
    if not isinstance(embed, PatchEmbed | ConvPatchEmbed) or getattr(
        embed, "dynamic_img_pad", False
    ):
        return
    for side in to_2tuple(embed.patch_size):
        if image_size % side:
            raise CasemateError(
                "model.options.patch_size",
                side,
                f"does not divide the image side {image_size}; change it or set model.upsample",
            )
