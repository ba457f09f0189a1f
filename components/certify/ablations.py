"""How many column bands one square patch can touch: the number every patch certificate rests on.

Symbols: w image width, b band, s stride, m patch side, K number of bands, Delta1 the answer.
Levine & Feizi 2020 (Theorem 1) give m + b - 1 for s = 1. With a stride that does not divide w the
bands over the right edge lie closer together than s, so that the common ceil((m + b - 1) / s) is
too small; here the masks themselves are counted, and the closed form with the seam only
cross-checks the count.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from components.data.ablation import column_mask, column_starts


def _closed_form(*, image_width: int, band: int, stride: int, patch: int) -> int:
    """Delta1 = min(K, ceil((m+b-1 + [b > r] (s-r)) / s)), r = w - s (K-1) the gap over the seam."""
    num_bands = -(-image_width // stride)
    seam = image_width - stride * (num_bands - 1)
    reach = patch + band - 1 + (stride - seam if band > seam else 0)
    return min(num_bands, -(-reach // stride))


@lru_cache(maxsize=256)
def touched_by(*, image_width: int, band: int, stride: int, patch: int) -> NDArray[np.bool_]:
    """(P, K) bool: does band k show the patch whose left column is p; P = w - m + 1, no wrap.

    Read-only, because the cached array is shared by all callers.
    """
    if not 1 <= patch <= image_width:
        raise ValueError(f"patch must be in [1, {image_width}], got {patch}")
    starts = column_starts(image_width, stride)
    kept = np.stack([column_mask(image_width, start, band).numpy() for start in starts])  # (K, W)
    windows = np.lib.stride_tricks.sliding_window_view(kept, patch, axis=1)  # (K, P, m)
    touched = np.ascontiguousarray(windows.any(axis=2).T)
    touched.setflags(write=False)
    return touched


@lru_cache(maxsize=256)
def num_touched(*, image_width: int, band: int, stride: int, patch: int) -> int:
    """Delta1: the most bands that any position of the patch can touch, counted exactly."""
    touched = touched_by(image_width=image_width, band=band, stride=stride, patch=patch)
    counted = int(touched.sum(axis=1).max())
    closed = _closed_form(image_width=image_width, band=band, stride=stride, patch=patch)
    assert counted == closed, f"{counted} bands counted, the closed form says {closed}"
    return counted
