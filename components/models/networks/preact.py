"""Pre-activation residual networks for 32-pixel images.

PreAct ResNet-18 (He et al. 2016, "Identity Mappings in Deep Residual Networks") and WRN-28-10
(Zagoruyko & Komodakis 2016, Table 1) are timm's `ResNetV2` of basic blocks behind another stem:
one 3x3 convolution that keeps the resolution, where ImageNet networks shrink it fourfold.
"""

from collections.abc import Sequence
from typing import Any

from timm.layers import BatchNormAct2d, create_conv2d
from timm.models.resnetv2 import ResNetV2
from torch import nn

from components.core.errors import CasemateError


def preact_resnet18(
    *,
    image_size: int,
    channels: int,
    num_classes: int,
    layers: Sequence[int] = (2, 2, 2, 2),
    widths: Sequence[int] = (64, 128, 256, 512),
    **options: Any,
) -> nn.Module:
    """Four groups of two blocks, 64 to 512 wide."""
    return _resnet(channels, num_classes, layers, widths, stem_chs=widths[0], **options)


def wrn_28_10(
    *,
    image_size: int,
    channels: int,
    num_classes: int,
    layers: Sequence[int] = (4, 4, 4),
    widths: Sequence[int] = (160, 320, 640),
    **options: Any,
) -> nn.Module:
    """Depth 28 = 3 groups of (28 - 4) / 6 = 4 blocks, 10 times as wide as 16, 32, 64."""
    return _resnet(channels, num_classes, layers, widths, stem_chs=16, **options)


def _resnet(
    channels: int,
    num_classes: int,
    layers: Sequence[int],
    widths: Sequence[int],
    *,
    stem_chs: int,
    **options: Any,
) -> nn.Module:
    """A network for any image size: the head averages over the remaining grid."""
    if any(width % 8 for width in widths):  # timm rounds them, but not those of the first norm
        raise CasemateError("model.options.widths", list(widths), "must be multiples of 8")
    net = ResNetV2(
        layers=list(layers),
        channels=tuple(widths),
        in_chans=channels,
        num_classes=num_classes,
        stem_chs=stem_chs,
        basic=True,
        bottle_ratio=1.0,
        conv_layer=create_conv2d,
        norm_layer=BatchNormAct2d,
        **options,
    )
    net.stem = nn.Sequential()
    net.stem.add_module("conv", nn.Conv2d(channels, stem_chs, 3, padding=1, bias=False))
    nn.init.kaiming_normal_(net.stem.conv.weight, mode="fan_out", nonlinearity="relu")
    for stage in net.feature_info:  # timm assumes a stem that reduces the side by 4
        stage["reduction"] = max(stage["reduction"] // 4, 1)
    network: nn.Module = net
    return network
