"""Double masking: a second certifier against one patch whose size is known (PatchCleanser).

Xiang, Mahloujifar & Mittal 2022. A set of masks hides every possible patch completely.
Images under one mask vote; where a mask disagrees with the majority, second masks decide whether
its class is accepted. Symbols: n side of the image, p patch, K masks, pair (i, j) the image under
masks i and j, (i, i) under one.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from components.certify.patch.ablations import Patch, patch_sides
from components.certify.patch.rules import check_votes
from components.certify.patch.settings import DoubleMaskingSettings
from components.core.errors import CasemateError
from components.core.settings import default_of
from components.core.types import Array, IntArray

PredictPairs = Callable[[IntArray], Array]  # (Q, 2) masks -> (Q,) classes


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskSet:
    """Rectangles such that any patch up to `patch`, anywhere in the image, lies inside one."""

    image_size: tuple[int, int]  # height, width
    patch: Patch
    num_masks: int = default_of(DoubleMaskingSettings, "num_masks")
    """Per side, at most; more masks are smaller."""

    def __post_init__(self) -> None:
        patch_sides(self.patch, self.image_size)
        whole = isinstance(self.num_masks, int) and not isinstance(self.num_masks, bool)
        if not whole or self.num_masks < 2:
            raise CasemateError(
                "certify.num_masks", self.num_masks, "is not a number of masks per side, 2 or more"
            )
        if self._hides_all():
            remedy = "is too large: two of its masks can hide the whole image"
            raise CasemateError("certify.mask_patch", self.patch, remedy)

    def __len__(self) -> int:
        """K: masks of the whole image."""
        return len(self._spans(0)) * len(self._spans(1))

    def _spans(self, axis: int) -> list[tuple[int, int]]:
        """(first, one past last) pixel of every mask along one side.

        Xiang et al. 2022, sec. 3.2: P = n - p + 1 positions, s = ceil(P / k) of them per mask,
        masks of p + s - 1 pixels at 0, s, 2s, ...; the last one is moved back inside the image.
        """
        size, patch = self.image_size[axis], patch_sides(self.patch, self.image_size)[axis]
        positions = size - patch + 1
        step = -(-positions // self.num_masks)
        length = patch + step - 1
        starts = (min(start, size - length) for start in range(0, positions, step))
        return [(start, start + length) for start in starts]

    def _hides_all(self) -> bool:
        """Whether two masks together can cover the image: both whole along one side, and the first
        and the last of the other side meet.
        """
        spans = self._spans(0), self._spans(1)
        whole = [s[0] == (0, n) for s, n in zip(spans, self.image_size, strict=True)]
        meet = [s[0][1] >= s[-1][0] for s in spans]
        return (whole[0] and meet[1]) or (whole[1] and meet[0])

    def masks(self) -> Tensor:
        """(K, H, W) bool: True on the pixels that a mask hides."""
        height, width = self.image_size
        hidden = torch.zeros(len(self), height, width, dtype=torch.bool)
        spans = [(rows, columns) for rows in self._spans(0) for columns in self._spans(1)]
        for mask, ((top, bottom), (left, right)) in zip(hidden, spans, strict=True):
            mask[top:bottom, left:right] = True
        return hidden

    def pairs(self) -> IntArray:
        """(K (K+1) / 2, 2): all pairs i <= j, in the order of the votes."""
        return np.stack(np.triu_indices(len(self)), axis=1).astype(np.int64)

    def visible(self, pairs: IntArray) -> Tensor:
        """(Q, H, W) bool: the pixels that each pair of masks leaves visible."""
        masks = self.masks()
        first, second = torch.from_numpy(pairs).unbind(dim=1)
        return ~(masks[first] | masks[second])

    def covers(self, patch: Patch) -> bool:
        """Whether every position of this patch lies inside a mask: true up to `self.patch`."""
        sides, limits = (patch_sides(p, self.image_size) for p in (patch, self.patch))
        return all(m <= limit for m, limit in zip(sides, limits, strict=True))


@dataclass(frozen=True, slots=True)
class DoubleMaskingClaims:
    """One row per item."""

    prediction: IntArray  # (N,) result of `infer` on the clean image
    num_agreeing: IntArray  # (N,) pairs that predict the same
    certified: NDArray[np.bool_]  # (N,) against every patch that the masks cover


def infer(predict: PredictPairs, *, num_masks: int) -> int:
    """The class of one image, patched or not (Xiang et al. 2022, Algorithm 1).

    A mask whose class differs from the majority's is accepted if no second mask changes that
    class: then it hides the patch. Ties of the majority go to the lowest class. Pairs are
    computed only when they are needed.
    """
    masks = np.arange(num_masks)
    first = np.asarray(predict(np.stack([masks, masks], axis=1)))
    majority = int(np.bincount(first).argmax())
    for mask in masks[first != majority]:
        others = masks[masks != mask]
        second = predict(np.stack([np.full_like(others, mask), others], axis=1))
        if (np.asarray(second) == first[mask]).all():
            return int(first[mask])
    return majority


def certify_pairs(pair_votes: Array, masks: MaskSet, *, num_classes: int) -> DoubleMaskingClaims:
    """Claims from the (N, K (K+1) / 2) classes of all pairs of masks on clean images.

    Where all pairs agree on c, `infer` returns c under every patch that the masks cover (Xiang et
    al. 2022, Theorem 1): the mask over the patch gives c under any second mask, so it is accepted
    if it is in the minority; any mask with another class is paired with it and is not accepted.
    """
    pairs = masks.pairs()
    check_votes(pair_votes, num_classes=num_classes, num_ablations=len(pairs))
    table = np.empty((len(masks), len(masks)), dtype=np.int64)
    prediction = np.empty(len(pair_votes), dtype=np.int64)
    for item, votes in enumerate(pair_votes):
        table[pairs[:, 0], pairs[:, 1]] = table[pairs[:, 1], pairs[:, 0]] = votes
        prediction[item] = infer(
            lambda chosen: table[chosen[:, 0], chosen[:, 1]], num_masks=len(masks)
        )
    agreeing: IntArray = (pair_votes == prediction[:, None]).sum(axis=1)
    return DoubleMaskingClaims(prediction, agreeing, agreeing == len(pairs))
