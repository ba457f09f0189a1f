"""Colour jitter: brightness, contrast and saturation by random factors in random order."""

from itertools import permutations

import numpy as np
import torch
from torch import Tensor

from components.core.types import Images
from components.data.augment.draws import Draws

BRIGHTNESS, CONTRAST, SATURATION = range(3)
ORDERS = np.array(list(permutations((BRIGHTNESS, CONTRAST, SATURATION))))
LUMA = (0.2989, 0.587, 0.114)  # ITU-R BT.601, with the digits of torchvision


def jitter(images: Images, draws: Draws, *, strength: float) -> Images:
    """Each factor uniform on 1 +- `strength` (not below 0); pixels stay in [0, 1].

    The three parts, their ranges and their random order are those of torchvision's ColorJitter
    (after Howard 2013, arXiv:1312.5402, sec. 2). Image by image, in place: a 224 x 224 image stays
    in the CPU cache, which is five times as fast as one pass over the batch per part.
    """
    table = draws.uniforms("jitter", 4)
    low, high = max(0.0, 1 - strength), 1 + strength
    factors = (low + table[:, :3] * (high - low)).tolist()
    orders = ORDERS[(table[:, 3] * len(ORDERS)).astype(np.int64)].tolist()
    result = images.clone()
    for image, factor, order in zip(result, factors, orders, strict=True):
        for part in order:
            torch.lerp(_base(image, part), image, factor[part], out=image).clamp_(0, 1)
    return result


def _base(image: Tensor, part: int) -> Tensor:
    """Base image of the blend f x + (1 - f) base: black, mean grey, or grey."""
    if part == BRIGHTNESS:
        return image.new_zeros(())
    luma = torch.tensor(LUMA, dtype=image.dtype, device=image.device)
    grey = torch.tensordot(luma, image, dims=1) if len(image) == 3 else image[0].clone()
    return grey.mean() if part == CONTRAST else grey
