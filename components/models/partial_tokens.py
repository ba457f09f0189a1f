"""Tokens of ablated images without the ablated images (for token dropping, see `tokens`).

A patch embedding is linear and hidden pixels are black before normalisation, so a cell that shows
the pixel set S embeds to
    E(S) = base + sum_{k in S} C_k,    C_k = W_k x_k / std,    base = bias - sum_k W_k mean / std
(derived from Salman et al. 2022, Algorithm 1). Bands cut cells along whole pixel columns or rows,
so almost every S is the cell itself, its first or its last lines: one forward and one backward scan
over the lines of every cell hold all those sums, at the cost of embedding the image once.

Differences of prefix sums are not used: they are equal only in exact arithmetic, and rounding of
hidden lines would affect the vote, which voids the certificate. A scan adds visible lines only. Any
other S (corners of squares, bands inside a cell) is embedded by itself, hidden pixels replaced by
0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from timm.layers import PatchEmbed
from torch import Tensor, nn

from components.core.precision import reduced
from components.core.transfers import sent
from components.models.fast import is_instrumented, is_patchwise
from components.models.tokens import forward_tokens, kept_indices, patch_size_of, with_positions

ALONE = -1  # instead of a pattern: no scan contains this set of pixels


@dataclass(frozen=True, slots=True)
class CutCells:
    """The T kept cells of each of R ablations, and the visible part of each cell."""

    kept: Tensor  # (R, T) raster index of the cell
    pattern: Tensor  # (R, T) number of the visible part, or ALONE

    def rows(self, index: Tensor) -> "CutCells":
        """The cells of the ablations `index`."""
        return CutCells(self.kept[index], self.pattern[index])


def can_embed_cuts(net: nn.Module) -> bool:
    """Whether the stem is a plain linear map without hooks, which sums may replace."""
    stem: Any = getattr(net, "patch_embed", None)
    return (
        type(stem) is PatchEmbed
        and is_patchwise(stem.proj)
        and "forward" not in vars(stem)
        and not is_instrumented(stem)
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
    """Pattern of (..., p) visible lines along one side; ALONE unless they reach one end."""
    side = lines.shape[-1]
    count = lines.sum(dim=-1)
    line = torch.arange(side, device=lines.device)
    first = (lines == (line < count[..., None])).all(dim=-1)
    last = (lines == (line >= side - count[..., None])).all(dim=-1)
    number = torch.where(first, count, torch.where(last, 2 * side - 1 - count, ALONE))
    return torch.where(count == side, 0, number)


class CutStem:
    """The patch embedding of a network, ready to embed parts of cells; pixels before `mean`.

    `patterns`, ascending, are those of the tables. Uses the current weights.
    """

    def __init__(self, net: Any, *, mean: Tensor, std: Tensor, patterns: Sequence[int]) -> None:
        stem = net.patch_embed
        self.net, self.patch_size = net, patch_size_of(net)
        self.weight = stem.proj.weight / std  # (D, C, tall, wide), for pixels without normalisation
        self.base = -(self.weight * mean).sum(dim=(1, 2, 3))
        if stem.proj.bias is not None:
            self.base = self.base + stem.proj.bias
        # Prefix tokens and positions: the network's output for zero patches.
        if stem.flatten:
            nothing = self.base.new_zeros(1, stem.num_patches, len(self.base))
        else:  # as the stem lays out its grid
            black = self.base.new_zeros(1, self.weight.shape[1], *stem.img_size)
            nothing = torch.zeros_like(stem(black))
        tokens, self.rotations = with_positions(net, nothing)
        self.prefix = tokens[:, : net.num_prefix_tokens]
        self.positions = tokens[0, net.num_prefix_tokens :]  # (N, D)
        self.patterns = tuple(patterns)
        num_by_column = 2 * (self.patch_size[1] - 1)
        by_row = [number - num_by_column for number in patterns if number > num_by_column]
        by_column = [number for number in patterns if 0 < number <= num_by_column]
        self.scans = []
        if by_row:
            self.scans.append(_Scan(self.weight, by_row, dim=2, first=num_by_column))
        if by_column or not by_row:
            self.scans.append(_Scan(self.weight, by_column, dim=3, first=0))

    def sums(self, cells: Tensor) -> list[Tensor]:
        """For each pattern, (N, D) of one image's (N, C, tall, wide) cells."""
        found: dict[int, Tensor] = {}
        for scan in self.scans:
            found |= scan(cells)
        return [found[number] for number in self.patterns]

    def alone(self, cells: Tensor, shown: Tensor) -> Tensor:
        """(n, D) sums of cells (n, C, tall, wide) over their pixels `shown`."""
        pixels = torch.where(shown, cells, torch.zeros((), device=cells.device)).flatten(1)
        with reduced("float32", cells.device.type):  # as exact as the table
            sums: Tensor = pixels @ self.weight.flatten(1).T
        return sums

    def positioned(self, sums: Tensor, place: Tensor) -> Tensor:
        """Tokens of (..., D) sums, which it overwrites, at raster indices `place`."""
        tokens: Tensor = self.net.patch_embed.norm(sums.add_(self.base))
        return tokens.add_(self.positions[place])


class _Scan:
    """Sums over the first and over the last lines of cells, up to some cuts along one side.

    `numbers` are patterns counted from `first`; `dim` counts in (n, C, tall, wide): 2 takes rows of
    pixels, 3 columns.
    """

    def __init__(self, weight: Tensor, numbers: Sequence[int], *, dim: int, first: int) -> None:
        side = weight.shape[dim]
        self.dim, self.first, self.side = dim, first, side
        cuts = sorted({number if number < side else number - side + 1 for number in numbers})
        self.edges = [0, *cuts, side]
        self.weights = [
            weight.narrow(dim, start, stop - start).flatten(1).T.contiguous()
            for start, stop in pairwise(self.edges)
        ]

    def __call__(self, cells: Tensor) -> dict[int, Tensor]:
        """(N, D) by number of the pattern; 0 is the whole cell."""
        parts = [  # what the lines between two cuts add
            cells.narrow(self.dim, start, stop - start).flatten(1) @ weight
            for (start, stop), weight in zip(pairwise(self.edges), self.weights, strict=True)
        ]
        forward, backward = list(accumulate(parts)), list(accumulate(reversed(parts)))[::-1]
        sums = {0: forward[-1]}
        for place, cut in enumerate(self.edges[1:-1], start=1):
            sums[self.first + cut] = forward[place - 1]
            sums[self.first + self.side - 1 + cut] = backward[place]
        return sums


class PartialTokens:
    """Kept tokens of (B, C, H, W) images under many ablations.

    The table costs one embedding of each image and holds the stem's patterns of all its cells.
    """

    def __init__(self, stem: CutStem, images: Tensor) -> None:
        self.stem, self.cells = stem, _cells(images, stem.patch_size)
        self.patterns = torch.tensor(stem.patterns)  # on the host, as the cells of ablations
        # image by image: other images must not change the rounding of sums
        sums = [part for cells in self.cells for part in stem.sums(cells)]
        self.table = torch.cat(sums)  # (B * patterns * N, D)

    def logits(self, cells: CutCells, *, image: Tensor, visible: Tensor | None) -> Tensor:
        """Logits of R ablations, with the arguments of `tokens`."""
        tokens = self.tokens(cells, image=image, visible=visible)
        kept = sent(cells.kept, tokens.device)
        return forward_tokens(self.stem.net, tokens, kept, self.stem.rotations)

    def tokens(self, cells: CutCells, *, image: Tensor, visible: Tensor | None) -> Tensor:
        """(R, P + T, D) of R ablations of the (R,) images numbered `image`, all on the host.

        Their (R, H, W) `visible` pixels, on the device, are needed if the pattern of a cell is
        ALONE.
        """
        stem, device = self.stem, self.table.device
        entry = torch.searchsorted(self.patterns, cells.pattern.clamp(min=0))
        index = (image[:, None] * len(self.patterns) + entry) * len(stem.positions) + cells.kept
        sums = self.table[sent(index, device)]
        if visible is not None:
            row, slot = (cells.pattern == ALONE).nonzero(as_tuple=True)
            numbers = torch.stack([row, slot, cells.kept[row, slot], image[row]])
            row, slot, place, source = sent(numbers, device).unbind()
            shown = _cells(visible[:, None], stem.patch_size)[row, place]
            sums[row, slot] = stem.alone(self.cells[source, place], shown)
        tokens = stem.positioned(sums, sent(cells.kept, device))
        return torch.cat([stem.prefix.expand(len(tokens), -1, -1), tokens], dim=1)


def _cells(images: Tensor, patch_size: tuple[int, int]) -> Tensor:
    """(B, N, C, tall, wide) cells of (B, C, H, W) images in raster order."""
    (num, channels, height, width), (tall, wide) = images.shape, patch_size
    split = images.reshape(num, channels, height // tall, tall, width // wide, wide)
    return split.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
