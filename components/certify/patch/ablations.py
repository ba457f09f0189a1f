"""How many ablations one patch can touch: the basis of every patch certificate.

Symbols, along one side of the image: w its size, b band, s stride, m patch, K number of bands,
r = w - s (K-1) the gap over the seam, Delta the result. Three formulas are in use:

- exact (ours): Levine & Feizi 2020 (Theorem 1) give m + b - 1 for s = 1. With a stride that does
  not divide w the bands over the edge lie closer together than s; `max_touched` counts the bands
  themselves, and a closed form with the seam only cross-checks the count.
- `paper_reference`: ceil((m + b - 1) / s), what the published code of Salman et al. 2022 computes.
  It ignores the seam and is too small for many strides that do not divide w: for tables only.
- as printed in Salman et al. 2022, appendix D: ceil((m + s - 1) / s), where s is once the band and
  once the stride. Without b it is far too small; not offered here.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from components.certify.patch.settings import AblationSettings
from components.core.errors import CasemateError
from components.core.settings import default_of
from components.core.types import Array, FloatArray
from components.data.ablation import Ablations, column_mask, column_starts

DeltaRule = Literal["exact", "paper_reference"]
DELTA_RULES: tuple[str, ...] = get_args(DeltaRule)
Patch = int | tuple[int, int]  # the side of a square, or height and width


def max_touched(size: int, *, width: int, stride: int, patch: int) -> int:
    """Delta along one side of `size` pixels: the most bands any position of the patch touches.

    `width` is that of a band, `patch` the extent of the patch along this side. Bands wrap around,
    the patch does not.
    """
    touched = touched_bands(size, width=width, stride=stride, patch=patch)
    counted = int(touched.sum(axis=1).max())
    closed = _closed_form(size, width=width, stride=stride, patch=patch)
    assert counted == closed, f"{counted} bands counted, the closed form gives {closed}"
    return counted


def _closed_form(size: int, *, width: int, stride: int, patch: int) -> int:
    """Delta = min(K, ceil((m+b-1 + [b > r] (s-r)) / s)): the seam counts once a band wraps."""
    num_bands = -(-size // stride)
    seam = size - stride * (num_bands - 1)
    extent = patch + width - 1 + (stride - seam if width > seam else 0)
    return min(num_bands, -(-extent // stride))


@lru_cache(maxsize=256)
def touched_bands(size: int, *, width: int, stride: int, patch: int) -> NDArray[np.bool_]:
    """(P, K) bool: whether band k shows the patch that starts at pixel p; P = w - m + 1, no wrap.

    Read-only, because the cached array is shared by all callers.
    """
    if not 1 <= patch <= size:
        raise ValueError(f"patch must be in [1, {size}], got {patch}")
    kept = np.stack([column_mask(size, q, width).numpy() for q in column_starts(size, stride)])
    before = np.pad(kept.cumsum(axis=1), ((0, 0), (1, 0)))  # (K, w+1) kept pixels left of each
    touched = np.ascontiguousarray((before[:, patch:] > before[:, :-patch]).T)
    touched.setflags(write=False)
    return touched


def patch_sides(patch: Patch, image_size: tuple[int, int]) -> tuple[int, int]:
    """Height and width of a patch, or an error unless it fits into the image."""
    sides = patch if isinstance(patch, tuple) else (patch, patch)
    if len(sides) != 2 or any(isinstance(m, bool) or not isinstance(m, int) for m in sides):
        raise CasemateError("certify.patch_sizes", patch, "is not a side in whole pixels")
    if not all(1 <= m <= side for m, side in zip(sides, image_size, strict=True)):
        height, width = image_size
        remedy = f"does not fit into the image, {height}x{width} pixels"
        raise CasemateError("certify.patch_sizes", patch, remedy)
    return sides


def num_touched(
    ablations: Ablations,
    patch: Patch,
    *,
    delta_rule: str = default_of(AblationSettings, "delta_rule"),
) -> int:
    """Delta of a whole set of ablations: the most that one patch, anywhere, can touch.

    A block shows the patch where its rows and its columns both do, so the sides multiply;
    families add up.
    """
    if delta_rule not in DELTA_RULES:
        known = ", ".join(DELTA_RULES)
        raise CasemateError("certify.delta_rule", delta_rule, f"is not one of {known}")
    sides, band, stride = patch_sides(patch, ablations.image_size), ablations.band, ablations.stride

    def along(size: int, m: int) -> int:
        if delta_rule == "paper_reference":
            return -(-(m + band - 1) // stride)
        return max_touched(size, width=band, stride=stride, patch=m)

    return sum(
        prod(along(size, m) for size, m in zip(family, sides, strict=True) if size is not None)
        for family in ablations.families
    )


@dataclass(frozen=True, slots=True)
class TouchedSets:
    """Which ablations each position of one patch touches, kept as factors along the two sides.

    Positions that touch the same ablations are listed once. A side that is not divided has one
    position and one band, so that all families broadcast to (P_h, P_w).
    """

    families: tuple[tuple[FloatArray, FloatArray], ...]  # (P_h, K_h) and (P_w, K_w) of 0 and 1
    sizes: FloatArray  # (P_h, P_w) = |A|

    def weight_inside(self, weights: Array) -> FloatArray:
        """(P_h, P_w): the sum of the (K,) weights over the ablations touched at each position.

        Float64 matrix products are exact on small integers, and far faster than integer ones.
        """
        total, low = np.zeros(self.sizes.shape), 0
        for rows, columns in self.families:
            shape = (rows.shape[1], columns.shape[1])
            high = low + prod(shape)
            total = total + rows @ weights[low:high].reshape(shape).astype(np.float64) @ columns.T
            low = high
        return total


@lru_cache(maxsize=64)
def touched_sets(ablations: Ablations, patch: Patch) -> TouchedSets:
    """The ablations touched at every position of a patch inside the image."""
    sides = patch_sides(patch, ablations.image_size)

    def along(size: int | None, m: int) -> FloatArray:
        if size is None:
            return np.ones((1, 1))
        shape = {"width": ablations.band, "stride": ablations.stride, "patch": m}
        return np.unique(touched_bands(size, **shape), axis=0).astype(np.float64)

    families = tuple(
        (along(rows, sides[0]), along(columns, sides[1])) for rows, columns in ablations.families
    )
    counts = [np.outer(rows.sum(axis=1), columns.sum(axis=1)) for rows, columns in families]
    return TouchedSets(families, sum(counts[1:], start=counts[0]))
