"""MixUp and CutMix: images and labels blended with those of a neighbour in the batch.

Zhang et al. 2018 (arXiv:1710.09412), sec. 1; Yun et al. 2019 (arXiv:1905.04899), eq. 1 and 2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import betaincinv
from torch import Tensor
from torch.nn import functional as F

from components.core.errors import CasemateError
from components.core.types import FloatArray, Images, IntArray, Labels
from components.data.augment.draws import Draws
from components.data.settings import AugmentSettings


class Blends(NamedTuple):
    """Per pair or batch: the weight of a row's own image and, for CutMix, the replaced box."""

    kept: FloatArray  # lambda, for the labels; for CutMix the share outside the box
    cut: NDArray[np.bool_]
    box: IntArray  # (P, 4): top, bottom, left, right


@dataclass(frozen=True, slots=True)
class Mixing:
    """Rows 2 i and 2 i + 1 exchange parts; alpha 0 disables MixUp or CutMix.

    Neighbours are paired, while timm pairs the first row with the last: workers with any even share
    of the global batch then mix as a single worker does.
    """

    settings: AugmentSettings

    @classmethod
    def of(cls, settings: AugmentSettings) -> Self | None:
        """The mixing of a recipe; None if both are off."""
        return cls(settings) if settings.mixes else None

    def apply(
        self,
        images: Images,
        labels: Labels,
        *,
        num_classes: int,
        smoothing: float,
        run_seed: int,
        epoch: int,
        step: int,
        item_ids: Sequence[str],
    ) -> tuple[Images, Tensor]:
        """Mixed images, and targets (B, K) that hold mixed and smoothed labels."""
        num_rows = len(images)
        if num_rows % 2:
            remedy = "leaves a worker an odd number of images; mixing needs pairs"
            raise CasemateError("train.batch_size", f"a share of {num_rows}", remedy)
        if not len(labels) == len(item_ids) == num_rows:
            raise ValueError(f"{num_rows} images, {len(labels)} labels, {len(item_ids)} item ids")
        neighbours = zip(item_ids[::2], item_ids[1::2], strict=True)
        pair_names = tuple(f"{step}|{first}|{second}" for first, second in neighbours)
        names = pair_names if self.settings.mix_mode == "pair" else (str(step),)
        height, width = images.shape[-2:]
        blends = self.draw(Draws(names, run_seed, epoch), height=height, width=width)
        targets = smoothed_targets(labels, num_classes=num_classes, smoothing=smoothing)
        rows = 2 if self.settings.mix_mode == "pair" else 1  # rows per blend; 1 broadcasts
        kept = torch.from_numpy(blends.kept).to(targets).repeat_interleave(rows)[:, None]
        pixels = kept_pixels(blends, height=height, width=width).to(images)
        pixels = pixels.repeat_interleave(rows, dim=0)[:, None]
        # lerp stays between its ends, so pixels stay in [0, 1]; the plain sum is symmetric, so at
        # lambda 1/2 both classes get exactly the same weight
        mixed = torch.lerp(_partners(images), images, pixels)
        return mixed, kept * targets + (1 - kept) * _partners(targets)

    def draw(self, draws: Draws, *, height: int, width: int) -> Blends:
        """Lambda ~ Beta(alpha, alpha), by inversion; CutMix takes the lambda of its clipped box."""
        own = self.settings
        mixed, switch, level, row, column = draws.uniforms("mixing", 5).T
        cut = switch < own.mix_switch
        if not (own.mixup and own.cutmix):
            cut = np.full(len(cut), own.cutmix > 0)
        alpha = np.where(cut, own.cutmix, own.mixup)
        kept = np.where(mixed < own.mix_prob, betaincinv(alpha, alpha, level), 1.0)
        box = cut_boxes(kept, row, column, height=height, width=width)
        top, bottom, left, right = box.T
        outside = 1 - (bottom - top) * (right - left) / (height * width)
        return Blends(np.where(cut, outside, kept), cut, box)


def cut_boxes(
    kept: FloatArray, row: FloatArray, column: FloatArray, *, height: int, width: int
) -> IntArray:
    """(P, 4) boxes of area 1 - lambda about a uniform centre, clipped at the edges (Yun, eq. 2)."""
    edges = []
    for place, side in ((row, height), (column, width)):
        length = np.floor(side * np.sqrt(1 - kept)).astype(np.int64)
        centre = np.floor(place * side).astype(np.int64)
        edges += [centre - length // 2, centre + (length + 1) // 2]
        edges[-2:] = [np.clip(edge, 0, side) for edge in edges[-2:]]
    return np.stack(edges, axis=1)


def kept_pixels(blends: Blends, *, height: int, width: int) -> Tensor:
    """(P, H, W) weight of a row's own pixels: lambda, or 0 in the box and 1 around it."""
    top, bottom, left, right = blends.box.T[..., None]
    rows, columns = np.arange(height), np.arange(width)
    inside = ((rows >= top) & (rows < bottom))[:, :, None]
    inside = inside & ((columns >= left) & (columns < right))[:, None, :]
    weights = np.where(blends.cut[:, None, None], ~inside, blends.kept[:, None, None])
    return torch.from_numpy(weights.astype(np.float32))


def smoothed_targets(labels: Labels, *, num_classes: int, smoothing: float) -> Tensor:
    """(B, K) float32: 1 - s + s / K at the label, s / K elsewhere (Szegedy et al. 2016, sec. 7)."""
    one_hot = F.one_hot(labels, num_classes).to(torch.float32)
    return one_hot * (1 - smoothing) + smoothing / num_classes


def _partners(rows: Tensor) -> Tensor:
    """Each row's neighbour: row i ^ 1."""
    return rows.reshape(-1, 2, *rows.shape[1:]).flip(1).reshape(rows.shape)
