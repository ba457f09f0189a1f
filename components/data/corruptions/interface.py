"""The interface of corruptions: random numbers of one image first, then the operator on a batch.

`sample` draws what an image needs from its own generator, `apply` is a deterministic function of
images and draws, so tests inject draws. Images are uint8 (N, H, W, 3) on both sides; operators work
in gray levels, 0 to 255, in float32, and end with `to_bytes`: the released script clips and
truncates, it does not round.
"""

from typing import Protocol

import torch
from torch import Tensor

Draws = dict[str, Tensor]  # of one image; of a batch with a leading dimension N
# Float32 filters return 99.99999 for a region of 100. The margin keeps such regions; it is far
# above the rounding (about 1e-4) and moves one pixel of a thousand by one gray level.
MARGIN = 1e-3


class Corruption(Protocol):
    """One corruption at any severity."""

    def sample(self, generator: torch.Generator, height: int, width: int, severity: int) -> Draws:
        """The draws of one image."""

    def apply(self, images: Tensor, draws: Draws, severity: int) -> Tensor:
        """The corrupted images; `draws` holds a row for each."""


class Deterministic:
    """Base of the corruptions that draw nothing."""

    __slots__ = ()

    def sample(self, generator: torch.Generator, height: int, width: int, severity: int) -> Draws:
        return {}


def to_bytes(levels: Tensor, *, margin: float = 0.0) -> Tensor:
    """uint8 of float gray levels, clipped and truncated; changes `levels`."""
    if margin:
        levels.add_(margin)
    return levels.clamp_(0, 255).to(torch.uint8)


def planes(images: Tensor) -> Tensor:
    """Float gray levels (N, 3, H, W) of uint8 (N, H, W, 3), contiguous."""
    return images.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)


def planes_to_bytes(levels: Tensor) -> Tensor:
    """uint8 (N, H, W, 3) of float gray levels (N, 3, H, W), contiguous; changes `levels`."""
    return to_bytes(levels, margin=MARGIN).permute(0, 2, 3, 1).contiguous()
