"""Glass: pixels are shuffled locally between two Gaussian filters (Hendrycks & Dietterich 2019).

The published loop scans the image from the bottom right and exchanges two pixels by a tuple
assignment of numpy views. Views alias, so the exchange is a copy: a pixel takes the value of its
neighbour, and the neighbour keeps it. That is what the released images show, so it is kept.
"""

import numpy as np
import torch
from scipy import ndimage
from torch import Tensor

from components.core.settings import settings
from components.data.corruptions.interface import Draws
from components.data.corruptions.settings import GlassBlurSettings


def scan_sources(shifts: Tensor, *, height: int, width: int) -> Tensor:
    """(N, H W) int32: the pixel that each pixel holds after one scan of copies.

    `shifts` (N, 2, H - 2d, W - 2d) are dx and dy of the rows d + 1 .. H - d and columns d + 1 ..
    W - d. A pixel copies from p. If p lies later in the image and inside the window, the scan has
    replaced it before, so the pixel receives what p received: links are followed to their ends by
    doubling (pointer jumping), which is exact for any order of the links.
    """
    num_images, _, rows, columns = shifts.shape
    delta = (height - rows) // 2
    own = torch.arange(num_images * height * width, dtype=torch.int32, device=shifts.device)
    own = own.view(num_images, height, width)
    window = (
        slice(None),
        slice(delta + 1, delta + 1 + rows),
        slice(delta + 1, delta + 1 + columns),
    )
    target = own.clone()
    target[window] += shifts[:, 1].int() * width + shifts[:, 0].int()
    inside = torch.zeros_like(own, dtype=torch.bool)
    inside[window] = True
    own, target = own.flatten(), target.flatten()
    linked = (target > own) & inside.flatten().index_select(0, target)
    end = torch.where(linked, target, own)
    while True:
        further = end.index_select(0, end)
        if torch.equal(further, end):
            break
        end = further
    return target.index_select(0, end)


def filtered(images: Tensor, sigma: float) -> Tensor:
    """Gaussian filter of uint8 (N, H, W, 3), truncated to uint8.

    In float64 with scipy's order of summation, as published: two truncations follow each other, and
    an image at .99999 of a gray level would differ by two levels.
    """
    pixels = images.cpu().numpy() / 255.0
    smooth = ndimage.gaussian_filter(pixels, (0, sigma, sigma, 0), mode="nearest", truncate=4.0)
    return torch.from_numpy((np.clip(smooth, 0, 1) * 255).astype(np.uint8)).to(images.device)


@settings
class GlassBlur(GlassBlurSettings):
    """Filter, shuffle, filter."""

    def sample(self, generator: torch.Generator, height: int, width: int, severity: int) -> Draws:
        _, delta, rounds = map(int, self.constants(severity, height, width))
        shape = (rounds, 2, height - 2 * delta, width - 2 * delta)
        shifts = torch.empty(shape, dtype=torch.int32)
        return {"shifts": shifts.random_(-delta, delta, generator=generator)}

    def apply(self, images: Tensor, draws: Draws, severity: int) -> Tensor:
        height, width = images.shape[1:3]
        sigma, *_ = self.constants(severity, height, width)
        scans = [
            scan_sources(shifts, height=height, width=width)
            for shifts in draws["shifts"].unbind(dim=1)
        ]
        sources = scans.pop()
        while scans:  # the last scan reads what the one before it wrote
            sources = scans.pop().index_select(0, sources)
        blurred = filtered(images, sigma).view(-1, 3)
        return filtered(blurred.index_select(0, sources).view(images.shape), sigma)
