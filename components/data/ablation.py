"""Ablations: copies of an image that keep one band or square of pixels and black out the rest.

Levine & Feizi 2020, sec. 3.2, as used by Salman et al. 2022. Bands wrap around the edges, so that
every pixel is kept equally often whenever the stride divides the side. Black is 0 before
normalisation.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from components.core.errors import CasemateError
from components.core.types import Images

KINDS = ("columns", "rows", "blocks", "both")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ablations:
    """All ablations of one kind on images of one size; their order is the order of votes.

    `columns` keep `band` columns, `rows` as many rows, `blocks` a square of that side (row by row
    of the grid of starts); `both` are the columns, then the rows.
    """

    kind: str
    image_size: tuple[int, int]  # height, width
    band: int
    stride: int

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise CasemateError("certify.kind", self.kind, f"is not one of {', '.join(KINDS)}")
        side = min(axis for family in self.families for axis in family if axis is not None)
        if side < 1:
            raise CasemateError("image_size", self.image_size, "is not a height and a width")
        for name, value in (("band", self.band), ("stride", self.stride)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise CasemateError(f"certify.{name}", value, "is not a whole number above 0")
            if value > side:
                raise CasemateError(f"certify.{name}", value, f"is larger than the image ({side})")

    @property
    def families(self) -> tuple[tuple[int | None, int | None], ...]:
        """Height and width along which each family ablates; None: all pixels are kept."""
        height, width = self.image_size
        columns, rows = (None, width), (height, None)
        of_kind = {"columns": (columns,), "rows": (rows,), "blocks": ((height, width),)}
        return of_kind.get(self.kind, (columns, rows))

    def __len__(self) -> int:
        """K: number of votes per image."""
        return sum(len(self.starts(rows)) * len(self.starts(cols)) for rows, cols in self.families)

    def starts(self, side: int | None) -> tuple[int, ...]:
        """First pixels of all bands along one side; a side that is not divided has one band."""
        return (0,) if side is None else column_starts(side, self.stride)

    def masks(self, index: Tensor | None = None) -> Tensor:
        """(K, H, W) bool: the visible pixels of every ablation, or of those numbered `index`.

        Without `index` this may need much memory: a large image has thousands of blocks at stride
        1.
        """
        chosen = torch.arange(len(self)) if index is None else index
        kept = [
            _kept_lines(starts, side, self.band)
            for starts, side in zip(self._corners(chosen), self.image_size, strict=True)
        ]
        return kept[0][:, :, None] & kept[1][:, None, :]

    def __getitem__(self, index: Tensor) -> Tensor:
        """(Q, H, W) bool: `masks(index)`, as if all masks were one tensor."""
        return self.masks(index)

    def _corners(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Top rows and left columns of the ablations numbered `index`; -1: not cut there."""
        tops, lefts = torch.full_like(index, -1), torch.full_like(index, -1)
        first = 0
        for rows, columns in self.families:
            wide = len(self.starts(columns))
            here, place = index >= first, index - first
            tops = torch.where(here, -1 if rows is None else place // wide * self.stride, tops)
            lefts = torch.where(here, -1 if columns is None else place % wide * self.stride, lefts)
            first += len(self.starts(rows)) * wide
        return tops, lefts


def _kept_lines(starts: Tensor, side: int, band: int) -> Tensor:
    """(R, side) bool: `band` lines from each start on, around the edge; all where it is -1."""
    lines = torch.arange(side, device=starts.device)
    return ((lines - starts[:, None]) % side < band) | (starts < 0)[:, None]


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

    Selection, not multiplication: 0 * inf is nan, so a hidden pixel could change the vote, which
    voids the certificate.
    """
    if visible.dtype != torch.bool:
        raise ValueError(f"visible must be a bool mask, got {visible.dtype}")
    if visible.ndim == 3:
        visible = visible[:, None]  # one mask per image, shared by its channels
    return torch.where(visible, images, torch.zeros((), dtype=images.dtype, device=images.device))
