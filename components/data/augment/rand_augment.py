"""RandAugment (Cubuk et al. 2020, arXiv:1909.13719) with timm's settings and our draws.

timm parses the setting and provides the operations. It draws from global generators that threads
share, so the operations of each image and the signs of the levels are drawn here.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy.special import ndtri
from timm.data.auto_augment import rand_augment_transform
from torch import Tensor

from components.core.errors import CasemateError
from components.core.types import FloatArray, IntArray
from components.data.augment.draws import Draws

LEVELS = 10.0  # timm's largest magnitude unless mmax is set
# timm skips unknown parts; here they are errors
SETTING = re.compile(
    r"rand(-(m\d+|n\d+|p\d+(\.\d+)?|mstd\d+(\.\d+)?|mmax\d+|inc[01]|t(weights|3aw|3a)))*"
)
RESAMPLING = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}

# Operations with a random sign: largest arguments, and enhancements about 1.
SIGNED_RANGES = {
    "Rotate": 30.0,
    "ShearX": 0.3,
    "ShearY": 0.3,
    "TranslateXRel": 0.45,
    "TranslateYRel": 0.45,
}
SIGNED_BLENDS = {f"{kind}Increasing" for kind in ("Color", "Contrast", "Brightness", "Sharpness")}


@dataclass(frozen=True, slots=True)
class DrawnOperations:
    """Operations of each image, (B, layers): which, whether applied, level and sign."""

    operation: IntArray
    applied: NDArray[np.bool_]
    level: FloatArray
    negative: NDArray[np.bool_]


def check_setting(setting: str) -> None:
    if not SETTING.fullmatch(setting):
        remedy = "is not a RandAugment setting; write for example rand-m9-mstd0.5-inc1"
        raise CasemateError("train.augment.rand_augment", setting, remedy)
    rand = rand_augment_transform(setting, {})
    if rand.num_layers < 1 or (rand.choice_weights is not None and rand.num_layers > len(rand.ops)):
        # weighted operations are drawn without replacement
        remedy = f"has {rand.num_layers} operations; write n1 to n{len(rand.ops)}"
        raise CasemateError("train.augment.rand_augment", setting, remedy)


@lru_cache
def policy(setting: str, *, fill: tuple[int, ...], interpolation: str) -> Any:
    """timm's RandAugment of a setting; `fill` is the value beyond the edge."""
    check_setting(setting)
    hparams = {"img_mean": fill, "interpolation": RESAMPLING[interpolation]}
    return rand_augment_transform(setting, hparams)


def draw_operations(rand: Any, draws: Draws) -> DrawnOperations:
    """Operations with replacement, or without it when they are weighted; levels as timm draws them.

    Weighted picks are the largest of u^(1/w) (Efraimidis & Spirakis 2006, Algorithm A).
    """
    layers, num_ops = rand.num_layers, len(rand.ops)
    table = draws.uniforms("rand-augment", 3 * layers + max(layers, num_ops))
    applied, noise, sign = np.split(table[:, : 3 * layers], 3, axis=1)
    choice = table[:, 3 * layers :]
    if rand.choice_weights is None:
        operation = np.floor(choice[:, :layers] * num_ops).astype(np.int64)
    else:
        keys = np.log(choice[:, :num_ops]) / rand.choice_weights
        operation = np.argsort(-keys, axis=1)[:, :layers]
    first = rand.ops[0]  # all operations of one setting share probability and magnitude
    if first.magnitude_std == float("inf"):
        level = noise * first.magnitude
    else:
        level = first.magnitude + first.magnitude_std * ndtri(noise)
    level = np.clip(level, 0, first.magnitude_max or LEVELS)
    return DrawnOperations(operation, applied <= first.prob, level, sign > 0.5)


def level_arguments(operation: Any, level: float, *, negative: bool) -> tuple[float, ...]:
    """Arguments of timm's function of an operation; timm's own maps draw the signs."""
    share = -level / LEVELS if negative else level / LEVELS
    if operation.name in SIGNED_RANGES:
        return (share * SIGNED_RANGES[operation.name],)
    if operation.name in SIGNED_BLENDS:
        return (max(0.1, 1 + share * 0.9),)
    if operation.level_fn is None:
        return ()
    return tuple(operation.level_fn(level, operation.hparams))


def perform(operation: Any, picture: Image.Image, *, level: float, negative: bool) -> Image.Image:
    """The picture after one of timm's operations."""
    arguments = level_arguments(operation, level, negative=negative)
    if operation.name.startswith("Posterize") and arguments[0] < 1:
        # timm passes 0 bits at the end of the range: black in the Pillow of published runs, an
        # error in today's
        return picture.point(lambda _: 0)
    changed: Image.Image = operation.aug_fn(picture, *arguments, **operation.kwargs)
    return changed


def rand_augment(
    images: Tensor, draws: Draws, *, setting: str, fill: tuple[int, ...], interpolation: str
) -> Tensor:
    """(B, C, H, W) uint8 of one or three channels, each image with its own operations."""
    channels = images.shape[1]
    fill = fill * channels if len(fill) == 1 else fill
    if len(fill) != channels:
        remedy = f"is for colour images, these have {channels} channel; write one value"
        raise CasemateError("train.augmentation.fill", fill, remedy)
    rand = policy(setting, fill=fill, interpolation=interpolation)
    drawn = draw_operations(rand, draws)
    result = images.cpu().clone(memory_format=torch.contiguous_format)
    arrays = result.numpy()  # the same memory
    for row in np.flatnonzero(drawn.applied.any(axis=1)).tolist():
        picture = to_picture(arrays[row])
        for layer in np.flatnonzero(drawn.applied[row]):
            picture = perform(
                rand.ops[drawn.operation[row, layer]],
                picture,
                level=float(drawn.level[row, layer]),
                negative=bool(drawn.negative[row, layer]),
            )
        for place, band in zip(arrays[row], picture.split(), strict=True):
            place[...] = np.asarray(band)
    return result.to(images.device)


def to_picture(planes: NDArray[np.uint8]) -> Image.Image:
    """A picture of (C, H, W) values; by bands, which is faster than interleaving them before."""
    bands = [Image.fromarray(plane) for plane in planes]
    return bands[0] if len(bands) == 1 else Image.merge("RGB", bands)
