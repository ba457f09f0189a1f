"""Weights adapted to a network of another patch size, image size or number of classes.

The stem of an XCiT changes its patch through strides alone (Debenedetti et al. 2022, fine-tuning on
CIFAR). The patch kernel of a ViT is resampled and position tables are interpolated; a head for
another number of classes cannot be adapted: `head_keys` lists the tensors that the new network
keeps.
"""

import warnings
from collections.abc import Mapping
from math import isqrt
from typing import Any

import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed, resample_patch_embed
from timm.layers.pos_embed_rel import resize_rel_pos_bias_table
from timm.models.xcit import Xcit
from torch import Tensor, nn

from components.core.errors import CasemateError

State = Mapping[str, Tensor]
Shape = tuple[int, ...]
ShapePair = tuple[Shape, Shape]  # in the weights, in the network
KERNEL_METHODS = ("bilinear", "pi", "sum")
BIAS_TABLE = "relative_position_bias_table"  # BEiT and Swin: one per attention layer


def set_xcit_patch(net: nn.Module, patch_size: int) -> None:
    """Give an XCiT patches of `patch_size` pixels; names and values of its weights do not change.

    The stem is a chain of n stride-2 convolutions, hence patches of 2**n pixels (16 or 8). Stride 1
    in the first log2(2**n / patch_size) of them reduces the patch accordingly: at patch 4 an image
    of 32 x 32 gives 8 x 8 tokens. Position codes are computed from the grid of tokens.
    """
    if not isinstance(net, Xcit):
        raise CasemateError(
            "model.options.stem_patch",
            patch_size,
            f"needs an XCiT, {type(net).__name__} is not one",
        )
    stem: Any = net.patch_embed
    convs = [layer for layer in stem.proj.modules() if isinstance(layer, nn.Conv2d)]
    sizes = [2**strided for strided in range(len(convs) + 1)]
    if patch_size not in sizes:
        raise CasemateError("model.options.stem_patch", patch_size, f"is not one of {sizes}")
    num_plain = len(convs) - sizes.index(patch_size)
    for index, conv in enumerate(convs):
        conv.stride = (1, 1) if index < num_plain else (2, 2)
    stem.patch_size = patch_size
    stem.num_patches = (stem.img_size[0] // patch_size) * (stem.img_size[1] // patch_size)
    for info in net.feature_info:
        info["reduction"] = patch_size


def resample_kernel(kernel: Tensor, size: tuple[int, int], *, method: str = "bilinear") -> Tensor:
    """A patch-embedding kernel (D, C, h, w) for patches of `size`; unchanged if it fits.

    - `bilinear` interpolates the kernel's values, as adversarial fine-tuning on CIFAR did
      (Mo et al. 2022).
    - `pi` keeps the embeddings of resized patches, in the least-squares sense (Beyer et al. 2023,
      FlexiViT, section 3.4).
    - `sum` adds up cells: on a native image it equals the given kernel on the image up-sampled by
      nearest neighbour, exactly, because every native pixel is repeated once per added value.
    """
    if method not in KERNEL_METHODS:
        raise ValueError(f"method must be one of {KERNEL_METHODS}, got {method!r}")
    height, width = kernel.shape[-2:]
    if (height, width) == size:
        return kernel
    if method == "bilinear":
        return F.interpolate(kernel.float(), size=size, mode="bilinear").to(kernel.dtype)
    if method == "pi":
        resampled: Tensor = resample_patch_embed(kernel, list(size))
        return resampled
    if height % size[0] or width % size[1]:
        raise CasemateError(
            "patch embedding",
            f"{height} x {width}",
            f"cannot be summed to {size[0]} x {size[1]}: needs whole factors; use bilinear or pi",
        )
    rows, columns = height // size[0], width // size[1]
    cells = kernel.reshape(*kernel.shape[:2], size[0], rows, size[1], columns)
    return cells.sum(dim=(3, 5))


def resample_positions(table: Tensor, *, grid: tuple[int, int], num_prefix: int) -> Tensor:
    """Position embeddings (1, prefix + tokens, D) on another grid: bicubic, prefix entries kept."""
    resampled: Tensor = resample_abs_pos_embed(
        table, new_size=list(grid), num_prefix_tokens=num_prefix
    )
    return resampled


def resample_bias_table(table: Tensor, attention: nn.Module) -> Tensor:
    """A relative position bias table (offsets, heads) for the window of `attention`."""
    layer: Any = attention
    with warnings.catch_warnings(action="ignore"):  # about the indexing inside timm's interpolation
        resampled: Tensor = resize_rel_pos_bias_table(
            table,
            new_window_size=layer.window_size,
            new_bias_shape=tuple(layer.relative_position_bias_table.shape),
        )
    return resampled


def is_resizable(name: str) -> bool:
    """Whether a tensor depends on the patch or image size and can be resampled."""
    return name in ("patch_embed.proj.weight", "pos_embed") or name.endswith(BIAS_TABLE)


def fit_sizes(
    state: State, net: nn.Module, *, kernel_method: str = "bilinear"
) -> tuple[dict[str, Tensor], dict[str, ShapePair]]:
    """`state` with patch kernel and position tables in the sizes of `net`, and what was resampled.

    Other tensors, and those that differ in more than size (channels, width, heads), are unchanged.
    """
    wanted = {name: tuple(value.shape) for name, value in net.state_dict().items()}
    fitted: dict[str, Tensor] = dict(state)
    resampled: dict[str, ShapePair] = {}
    for name in filter(is_resizable, state.keys() & wanted.keys()):
        value, shape = state[name], wanted[name]
        if tuple(value.shape) != shape and _differs_in_size_only(name, value, shape, net):
            fitted[name] = _resample(name, value, net, kernel_method)
            resampled[name] = (tuple(value.shape), shape)
    return fitted, resampled


def _differs_in_size_only(name: str, value: Tensor, shape: Shape, net: nn.Module) -> bool:
    old = tuple(value.shape)
    if len(old) != len(shape):
        return False
    if name == "pos_embed":
        tokens = old[1] - _num_prefix(net)
        return old[2] == shape[2] and tokens > 0 and isqrt(tokens) ** 2 == tokens  # square grids
    if name.endswith(BIAS_TABLE):
        return old[1] == shape[1]
    return old[:2] == shape[:2]


def _resample(name: str, value: Tensor, net: nn.Module, kernel_method: str) -> Tensor:
    embed: Any = getattr(net, "patch_embed", None)
    if name == "pos_embed":
        return resample_positions(value, grid=embed.grid_size, num_prefix=_num_prefix(net))
    if name.endswith(BIAS_TABLE):
        return resample_bias_table(value, net.get_submodule(name.removesuffix(f".{BIAS_TABLE}")))
    return resample_kernel(value, embed.patch_size, method=kernel_method)


def _num_prefix(net: nn.Module) -> int:
    """Entries of the position table without a patch: class, distillation, registers."""
    table: Any = net.pos_embed
    embed: Any = net.patch_embed
    return int(table.shape[1] - embed.num_patches)


def head_keys(net: nn.Module) -> frozenset[str]:
    """Names of the class head's tensors, from timm's `get_classifier`."""
    network: Any = net
    if not hasattr(network, "get_classifier"):
        return frozenset()
    classifier = network.get_classifier()
    heads = classifier if isinstance(classifier, tuple) else (classifier,)
    prefixes = [name for name, layer in net.named_modules() if any(layer is h for h in heads)]
    return frozenset(
        key for key in net.state_dict() if any(key.startswith(f"{p}.") for p in prefixes)
    )
