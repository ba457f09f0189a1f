"""Column ablations: copies of an image that keep one vertical band and black out the rest.

Levine & Feizi 2020, sec. 3.2, as used by Salman et al. 2022. Bands wrap around the right edge, so
that every column is kept by equally many bands whenever the stride divides the width. Black is 0
before normalisation.
"""

import torch
from torch import Tensor

from components.core.types import Images


def column_starts(image_width: int, stride: int) -> tuple[int, ...]:
    """First columns of all bands, in voting order: 0, s, 2s, ... below the width."""
    if not 1 <= stride <= image_width:
        raise ValueError(f"stride must be in [1, {image_width}], got {stride}")
    return tuple(range(0, image_width, stride))


def column_mask(image_width: int, start: int, band: int) -> Tensor:
    """(W,) bool: True on the columns start, ..., start + band - 1, modulo the width."""
    if not 1 <= band <= image_width:
        raise ValueError(f"band must be in [1, {image_width}], got {band}")
    if not 0 <= start < image_width:
        raise ValueError(f"start must be in [0, {image_width}), got {start}")
    return (torch.arange(image_width) - start) % image_width < band


def ablate(images: Images, visible: Tensor) -> Images:
    """Images whose pixels outside `visible` are 0; `visible` is bool (W,), (H, W) or (B, H, W).

    Selection, not multiplication: 0 * inf is nan, which would let a hidden pixel reach the vote
    and void the certificate.
    """
    if visible.dtype != torch.bool:
        raise ValueError(f"visible must be a bool mask, got {visible.dtype}")
    if visible.ndim == 3:
        visible = visible[:, None]  # one mask per image, shared by its channels
    return torch.where(visible, images, torch.zeros((), dtype=images.dtype, device=images.device))
