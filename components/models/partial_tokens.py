"""Tokens of ablated images without the ablated images (for token dropping, see `tokens`).

A patch embedding is linear and hidden pixels are black before normalisation, so a cell that shows
the pixel set S embeds to
    E(S) = base + sum_{k in S} C_k,    C_k = W_k x_k / std,    base = bias - sum_k W_k mean / std
(derived from Salman et al. 2022, Algorithm 1). Bands cut cells along whole pixel columns or rows,
so almost every S is the cell itself, its first or its last lines: one forward and one backward scan
over the lines of every cell hold all those sums, at the price of embedding the image once.

Never as differences of prefix sums: those are equal in the reals only, and the rounding of hidden
lines would reach the vote, which voids the certificate. A scan adds visible lines and nothing else.
Any other S (corners of squares, bands inside a cell) is embedded by itself, hidden pixels
replaced by 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from timm.layers import PatchEmbed
from torch import Tensor, nn

from components.models.fast import is_hooked, is_patchwise
from components.models.tokens import forward_tokens, kept_indices, patch_size_of, with_positions

ALONE = -1  # in the place of a pattern: no scan holds this set of pixels


@dataclass(frozen=True, slots=True)
class CutCells:
    """The kept cells of R ablations that keep T each, and what each of them shows."""

    kept: Tensor  # (R, T) raster index of the cell
    pattern: Tensor  # (R, T) number of the visible part, or ALONE

    def rows(self, index: Tensor) -> "CutCells":
        """The cells of some of the ablations."""
        return CutCells(self.kept[index], self.pattern[index])


def can_embed_cuts(net: nn.Module) -> bool:
    """Whether the stem is the plain linear map that sums may replace, with nobody looking in."""
    stem: Any = getattr(net, "patch_embed", None)
    return (
        type(stem) is PatchEmbed
        and is_patchwise(stem.proj)
        and not any(is_hooked(part) or "forward" in vars(part) for part in stem.modules())
    )


def cut_cells(visible: Tensor, keep: Tensor, patch_size: tuple[int, int]) -> CutCells:
    """The (R, N) cells `keep` under (R, H, W) visible pixels; all rows keep equally many."""
    kept = kept_indices(keep)
    cells = _cells(visible[:, None], patch_size)[:, :, 0]  # (R, N, tall, wide)
    shown = cells.gather(1, kept[..., None, None].expand(-1, -1, *patch_size))
    return CutCells(kept, _patterns(shown))


def _patterns(shown: Tensor) -> Tensor:
    """Number of each (..., tall, wide) set of pixels: 0 whole; first and last columns; then rows.

    Of p lines, the first e are number e and those from a on number p - 1 + a; 0 < e, a < p.
    """
    wide = shown.shape[-1]
    rows, columns = shown.any(dim=-1), shown.any(dim=-2)
    by_column, by_row = _end_of_side(columns), _end_of_side(rows)
    by_row = torch.where(by_row > 0, by_row + 2 * (wide - 1), by_row)
    pattern = torch.where(rows.all(dim=-1), by_column, by_row)
    crossing = ~(rows.all(dim=-1) | columns.all(dim=-1))
    ragged = (shown != rows[..., :, None] & columns[..., None, :]).flatten(-2).any(dim=-1)
    return pattern.masked_fill(crossing | ragged, ALONE)


def _end_of_side(lines: Tensor) -> Tensor:
    """Number of (..., p) visible lines along one side; ALONE unless they reach one end."""
    side = lines.shape[-1]
    count = lines.sum(dim=-1)
    line = torch.arange(side, device=lines.device)
    first = (lines == (line < count[..., None])).all(dim=-1)
    last = (lines == (line >= side - count[..., None])).all(dim=-1)
    number = torch.where(first, count, torch.where(last, 2 * side - 1 - count, ALONE))
    return torch.where(count == side, 0, number)


class PartialTokens:
    """Kept tokens of (B, C, H, W) images under many ablations; pixels as they are before `mean`.

    The table costs one embedding of each image and holds the given patterns of all its cells.
    """

    def __init__(
        self, net: Any, images: Tensor, *, mean: Tensor, std: Tensor, patterns: Sequence[int]
    ) -> None:
        stem = net.patch_embed
        self.net, self.patch_size = net, patch_size_of(net)
        self.weight = stem.proj.weight / std  # (D, C, tall, wide), for pixels without normalisation
        self.base = -(self.weight * mean).sum(dim=(1, 2, 3))
        if stem.proj.bias is not None:
            self.base = self.base + stem.proj.bias
        # Prefix tokens and positions are what the network makes of patches of 0.
        if stem.flatten:
            nothing = images.new_zeros(1, stem.num_patches, len(self.base))
        else:
            nothing = torch.zeros_like(stem(images[:1]))  # as the stem lays out its grid
        tokens, self.rotations = with_positions(net, nothing)
        self.prefix = tokens[:, : net.num_prefix_tokens]
        self.positions = tokens[0, net.num_prefix_tokens :]  # (N, D)
        self.cells = _cells(images, self.patch_size)
        self.patterns = torch.tensor(patterns, device=images.device)  # ascending
        # image by image: other images must not change how sums are rounded
        sums = torch.stack([part for cells in self.cells for part in self._sums(cells, patterns)])
        self.table = self._positioned(sums, slice(None))  # (B * patterns, N, D)

    def logits(self, cells: CutCells, *, image: Tensor, visible: Tensor | None) -> Tensor:
        """Logits of R ablations, as `tokens` takes them."""
        tokens = self.tokens(cells, image=image, visible=visible)
        return forward_tokens(self.net, tokens, cells.kept, self.rotations)

    def tokens(self, cells: CutCells, *, image: Tensor, visible: Tensor | None) -> Tensor:
        """(R, P + T, D) of R ablations of the (R,) images numbered `image`.

        Their (R, H, W) visible pixels are asked for where some cell's pattern is ALONE.
        """
        entry = torch.searchsorted(self.patterns, cells.pattern.clamp(min=0))
        index = (image[:, None] * len(self.patterns) + entry) * len(self.positions) + cells.kept
        tokens = self.table.flatten(0, 1)[index]
        if visible is not None:
            row, slot = (cells.pattern == ALONE).nonzero(as_tuple=True)
            place = cells.kept[row, slot]
            shown = _cells(visible[:, None], self.patch_size)[row, place]
            tokens[row, slot] = self._alone(self.cells[image[row], place], shown, place)
        return torch.cat([self.prefix.expand(len(tokens), -1, -1), tokens], dim=1)

    def _sums(self, cells: Tensor, patterns: Sequence[int]) -> list[Tensor]:
        """For each pattern, (N, D) of one image's (N, C, tall, wide) cells."""
        num_by_column = 2 * (self.patch_size[1] - 1)
        sums: dict[int, Tensor] = {}
        if any(number > num_by_column for number in patterns):
            sums |= _scans(*self._lines(cells, dim=2), first=num_by_column + 1)
        if any(0 < number <= num_by_column for number in patterns) or not sums:
            sums |= _scans(*self._lines(cells, dim=3), first=1)
        return [sums[number] for number in patterns]

    def _alone(self, cells: Tensor, shown: Tensor, place: Tensor) -> Tensor:
        """(n, D): cells (n, C, tall, wide) that show only `shown`, at raster indices `place`."""
        pixels = torch.where(shown, cells, torch.zeros((), device=cells.device)).flatten(1)
        with torch.autocast(cells.device.type, enabled=False):  # as exact as the table
            return self._positioned(pixels @ self.weight.flatten(1).T, place)

    def _positioned(self, sums: Tensor, place: Tensor | slice) -> Tensor:
        tokens: Tensor = self.net.patch_embed.norm(sums.add_(self.base))
        return tokens.add_(self.positions[place])

    def _lines(self, cells: Tensor, *, dim: int) -> tuple[Tensor, Tensor]:
        """Pixels (p, N, ...) and weights (p, ..., D) of each line along one side of the cells.

        `dim` counts in (D, C, tall, wide): 2 takes rows of pixels, 3 columns.
        """
        pixels = cells.movedim(dim, 0).flatten(2)
        return pixels, self.weight.movedim(dim, 0).flatten(2).transpose(1, 2)


def _scans(pixels: Tensor, weight: Tensor, *, first: int) -> dict[int, Tensor]:
    """Sums over the first and over the last lines of every cell; 0 is the whole cell."""
    lines = torch.bmm(pixels, weight).unbind()  # p times (N, D): what each line adds
    forward, backward = list(accumulate(lines)), list(accumulate(reversed(lines)))
    side = len(lines)
    heads = {first + e - 1: forward[e - 1] for e in range(1, side)}
    tails = {first + side - 2 + a: backward[side - a - 1] for a in range(1, side)}
    return {0: forward[-1], **heads, **tails}


def _cells(images: Tensor, patch_size: tuple[int, int]) -> Tensor:
    """(B, N, C, tall, wide) cells of (B, C, H, W) images in raster order."""
    (num, channels, height, width), (tall, wide) = images.shape, patch_size
    split = images.reshape(num, channels, height // tall, tall, width // wide, wide)
    return split.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
