"""Denoising networks: diffusers' UNet of images in [-1, 1] and the times of their noise levels."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from components.core.errors import CasemateError


class TimedUNet(nn.Module):
    """diffusers' `UNet2DModel` as a plain function of tensors: (B, C, H, W), (B,) -> (B, C', H, W).

    C' is C, or 2 C where the second half predicts a variance. With `patch` > 1, squares of this
    side become the channels of one pixel (space to depth), so the network works at 1 / `patch` of
    the image side.
    """

    def __init__(self, unet: Any, *, patch: int = 1) -> None:
        super().__init__()
        check_config(unet.config)
        self.unet, self.patch = unet, patch

    def forward(self, noisy: Tensor, times: Tensor) -> Tensor:
        seen = F.pixel_unshuffle(noisy, self.patch)
        # diffusers rounds plain numbers to whole timesteps; tensors are not rounded
        output: Tensor = self.unet(seen, times, return_dict=False)[0]
        return F.pixel_shuffle(output, self.patch)

    @property
    def channels(self) -> int:
        return int(self.unet.config.in_channels) // self.patch**2

    @property
    def stride(self) -> int:
        """Image sides must be multiples of this."""
        return self.patch << (len(self.unet.config.block_out_channels) - 1)

    @property
    def takes_fractions(self) -> bool:
        """Whether fractional timesteps are supported."""
        return bool(self.unet.config.time_embedding_type == "positional")


def check_config(config: Mapping[str, Any]) -> None:
    """Raise an error for a `UNet2DModel` that is not an unconditional image denoiser."""
    key = "denoiser"
    if config.get("time_embedding_type") == "fourier":
        remedy = "is that of a variance-exploding model, which is not supported"
        raise CasemateError(f"{key}.time_embedding_type", "fourier", remedy)
    for name in ("class_embed_type", "num_class_embeds"):
        if config.get(name) is not None:
            remedy = "is not supported: a denoiser must not be conditioned on the label"
            raise CasemateError(f"{key}.{name}", config[name], remedy)
    given, made = config.get("in_channels", 3), config.get("out_channels", 3)
    if made not in (given, 2 * given):
        remedy = f"are neither the {given} channels that go in nor twice as many"
        raise CasemateError(f"{key}.out_channels", made, remedy)


def unet(
    *, image_size: int, channels: int, num_classes: int, patch: int = 1, **config: Any
) -> nn.Module:
    """Any `UNet2DModel`: `config` holds its arguments, except the number of input channels."""
    from diffusers import UNet2DModel  # takes seconds to import; classifiers do not need it

    if patch < 1 or image_size % patch:
        raise ValueError(f"an image side of {image_size} is not a multiple of patch {patch}")
    variance, inputs = (2 if config.pop("learn_variance", False) else 1), channels * patch**2
    sizes = {
        "in_channels": inputs,
        "out_channels": inputs * variance,
        "sample_size": image_size // patch,
    }
    return TimedUNet(UNet2DModel(**{**config, **sizes}), patch=patch)


def tiny_unet(
    *,
    image_size: int,
    channels: int,
    num_classes: int,
    widths: tuple[int, ...] = (8, 16, 32),
    num_layers: int = 1,
    norm_groups: int = 4,
    head_width: int = 8,
    patch: int = 1,
) -> nn.Module:
    """A UNet for small images, attention at its lowest resolution only; 0.16 million weights."""
    levels = len(widths)
    if image_size % (patch * 2 ** (levels - 1)):
        raise ValueError(
            f"an image side of {image_size} cannot be cut into patches of {patch} and halved "
            f"{levels - 1} times"
        )
    return unet(
        image_size=image_size,
        channels=channels,
        num_classes=num_classes,
        patch=patch,
        block_out_channels=tuple(widths),
        down_block_types=("DownBlock2D",) * levels,
        up_block_types=("UpBlock2D",) * levels,
        layers_per_block=num_layers,
        norm_num_groups=norm_groups,
        attention_head_dim=head_width,
    )
